#include "stoker/store/store_file.h"

#include <unistd.h>

#include <random>

#include "stoker/base/log.h"
#include "stoker/io/nvme/command.h"
#include "stoker/store/writer_lock.h"

namespace stoker {

std::string StoreFile::locked_path() const {
  if (!nvme::is_target(file_path)) return file_path;
  const auto target = nvme::parse_target(file_path);
  if (!target) return file_path;
  if (!nvme::is_pci_target(file_path)) return target->device;
  const size_t begin = nvme::is_spdk_target(file_path) ? std::string_view("spdk:").size() : 0;
  const std::string address = target->device.substr(begin, target->device.find('/') - begin);
  return "/sys/bus/pci/devices/" + address + "/config";
}

void name_holder(StoreFile& file, const StoreOptions& options) {
  // A device of commands takes no bytes but by these.
  if (file.lock_fd < 0 || options.read_only || nvme::is_target(file.file_path)) return;
  write_holder(file.lock_fd,
               options.holder.empty() ? "pid " + std::to_string(getpid()) : options.holder);
  file.named = true;
}

void close_store_file(Loop& loop, StoreFile& file) {
  if (file.file.id >= 0) {
    if (const Status closed = loop.close(file.file.id); !closed) {
      log().warn("{}", closed.error().message());
      return;
    }
  }
  if (file.made) unlink(file.file_path.c_str());
  // the next holder is not taken for us before it has put its own name there
  if (file.named) write_holder(file.lock_fd, "");
  if (file.lock_fd >= 0) unlock_file(file.lock_fd);
}

StoreId random_store_id() {
  std::random_device random;
  StoreId id;
  for (auto& byte : id) byte = static_cast<uint8_t>(random());
  return id;
}

}  // namespace stoker
