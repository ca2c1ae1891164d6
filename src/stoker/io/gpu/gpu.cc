#include "stoker/io/gpu/gpu.h"

#include <array>
#include <utility>

#include "stoker/base/bytes.h"
#include "stoker/base/log.h"

namespace stoker::gpu {
namespace {

constexpr int kOutOfMemory = 2;  // of CUDA

uint64_t address(const void* data) { return reinterpret_cast<uintptr_t>(data); }

}  // namespace

Result<std::shared_ptr<Gpu>> Gpu::open(int ordinal, const Libraries& libraries) {
  auto cuda = load_cuda(libraries.cuda);
  if (!cuda) return cuda.error().with("there is no GPU to use");
  std::shared_ptr<Gpu> gpu(new Gpu(*cuda));
  STOKER_TRY(gpu->start(ordinal));
  gpu->open_door(libraries.cufile);
  return gpu;
}

Status Gpu::check(int error, const char* doing) const {
  if (error == 0) return {};
  return fail(Code::io, "{} failed with the CUDA error {}; check the GPU with nvidia-smi", doing,
              error);
}

Status Gpu::start(int ordinal) {
  STOKER_TRY(check(cuda_.init(0), "starting CUDA"));
  int device = -1;
  if (cuda_.device_get(&device, ordinal) != 0)
    return fail(Code::not_found, "there is no GPU {}; they are numbered from 0", ordinal);
  STOKER_TRY(check(cuda_.context_retain(&context_, device), "taking the GPU"));
  device_ = device;
  std::array<char, 128> name{};
  STOKER_TRY(
      check(cuda_.device_name(name.data(), static_cast<int>(name.size()) - 1, device), "naming"));
  name_ = name.data();
  return enter();
}

void Gpu::open_door(const std::string& library) {
  auto table = load_cufile(library);
  if (!table) {
    why_no_cufile_ = table.error().what;
    return;
  }
  const CuFileError opened = table->driver_open();
  if (opened.error != 0) {
    why_no_cufile_ = cufile_sentence(opened.error);
    return;
  }
  cufile_ = *table;
}

Gpu::~Gpu() {
  if (cufile_) cufile_->driver_close();
  if (device_ >= 0) cuda_.context_release(device_);
}

Status Gpu::enter() { return check(cuda_.context_set(context_), "choosing the GPU"); }

Result<std::unique_ptr<Arena>> Gpu::make_arena(uint64_t bytes, Budget& budget) {
  // A page more: offsets in an arena are aligned by its begin.
  const uint64_t size = align_up(std::max<uint64_t>(bytes, 1), kIoAlign);
  STOKER_ASSIGN(Grant grant, budget.take(size + kIoAlign, "an arena of GPU memory"));
  STOKER_TRY(enter());
  uint64_t raw = 0;
  const int error = cuda_.allocate(&raw, size + kIoAlign);
  if (error == kOutOfMemory)
    return fail(Code::over_budget,
                "the GPU has less than the {} of free memory that are asked for: end other "
                "processes that use it, or ask for less",
                human_bytes(size));
  STOKER_TRY(check(error, "taking memory of the GPU"));
  // NOLINTNEXTLINE(performance-no-int-to-ptr): CUDA has its addresses as numbers
  auto* data = reinterpret_cast<std::byte*>(align_up(raw, kIoAlign));
  return Arena::over(data, size, std::move(grant), [gpu = shared_from_this(), raw] {
    if (!gpu->enter() || gpu->cuda_.free(raw) != 0)
      log().warn("memory of the GPU cannot be freed: it stays in use until this process ends");
  });
}

Status Gpu::copy(void* to, const void* from, size_t bytes) {
  STOKER_TRY(enter());
  return check(cuda_.copy(address(to), address(from), bytes), "a copy to or from the GPU");
}

bool Gpu::pin(const Arena& arena) {
  return enter() && cuda_.pin(arena.data(), arena.size(), 0) == 0;
}

void Gpu::unpin(const Arena& arena) {
  if (enter()) cuda_.unpin(arena.data());
}

}  // namespace stoker::gpu
