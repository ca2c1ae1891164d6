// stoker nvme list | bind | unbind: the NVMe drives of this machine, and who drives them.
#include <cstdio>
#include <memory>
#include <string>

#include "command.h"
#include "stoker/io/nvme/device.h"

namespace stoker::cli {
namespace {

Status list() {
  STOKER_ASSIGN(const auto drives, nvme::list_drives());
  if (drives.empty()) std::puts("This machine has no NVMe drive.");
  for (const nvme::Drive& drive : drives) {
    std::string line = drive.address + "  " + (drive.driver.empty() ? "no driver" : drive.driver);
    if (!drive.model.empty()) line += "  " + drive.model;
    for (const std::string& device : drive.devices) line += "  nvme:" + device;
    if (drive.driver == "vfio-pci") line += "  nvme:" + drive.address;
    std::puts(line.c_str());
  }
  return {};
}

}  // namespace

void add_nvme(CLI::App& app, ExitStatus& status) {
  CLI::App* command = app.add_subcommand("nvme", "NVMe drives without the kernel's block layer");
  command->require_subcommand(1);
  command->add_subcommand("list", "Name the NVMe drives of this machine, and who drives them")
      ->callback([&status] {
        if (const Status done = list(); !done) tell(status, done.error());
      });
  const auto address = std::make_shared<std::string>();
  const auto add = [&](const char* name, const char* what,
                       Status (*change)(const std::string&, const std::string&)) {
    CLI::App* changing = command->add_subcommand(name, what);
    changing->add_option("ADDRESS", *address, "Its PCI address, such as 0000:00:04.0")->required();
    changing->callback([&status, address, change] {
      if (const Status done = change(*address, "/sys"); !done) tell(status, done.error());
    });
  };
  add("bind", "Take a drive from the kernel, for the engine vfio (as root)", nvme::bind_drive);
  add("unbind", "Give it back to the kernel (as root)", nvme::unbind_drive);
}

}  // namespace stoker::cli
