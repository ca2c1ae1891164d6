// NVMe as its specification has it: what a command says, what a drive tells about itself, and the
// statuses as sentences. Pure functions; who carries the commands is elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "stoker/base/counters.h"
#include "stoker/base/result.h"
#include "stoker/io/op.h"

namespace stoker::nvme {

// What differs from one command to the next; the rest of its 64 bytes is zero.
struct Command {
  uint8_t opcode = 0;
  uint32_t space = 0;  // the number of the namespace
  std::byte* data = nullptr;
  uint32_t bytes = 0;  // of `data`
  uint32_t word10 = 0, word11 = 0, word12 = 0;
};

inline constexpr size_t kIdentifyBytes = 4096;
Command identify(uint8_t what, uint32_t space, std::span<std::byte, kIdentifyBytes> answer);
inline constexpr uint8_t kIdentifyNamespace = 0, kIdentifyController = 1;

// What the answer about a controller tells.
struct Controller {
  std::string model, serial, firmware;
  uint64_t transfer_bytes = 0;  // of one command at most, in pages of 4 KiB; 0: no bound
  bool shadows = false;         // it can be told of doorbells in memory
};
Controller read_controller(std::span<const std::byte, kIdentifyBytes> answer);

// A namespace, as commands need it.
struct Space {
  uint32_t number = 0;
  uint32_t block_bytes = 0;
  uint64_t blocks = 0;
  uint64_t transfer_bytes = 0;  // of one command at most
  uint64_t bytes() const { return blocks * block_bytes; }
};
// unsupported, with what to do, for formats that carry more than plain blocks.
Result<Space> read_space(std::span<const std::byte, kIdentifyBytes> answer, uint32_t number,
                         const Controller& controller);

// The command for what is left of the op, or for as much of it as one command takes. `base` is
// where the op's file begins in the namespace.
Command command_of(const Op& op, const Space& space, uint64_t base);
// How many bytes of the op that command moves.
uint64_t bytes_of_next(const Op& op, const Space& space);

// A drive's answer that is no success. `status` is the status field without its phase bit.
struct Failure {
  int sys_errno = 0;
  std::string sentence;
};
Failure failure_of(uint16_t status);

// Whether the op lies in its file, which has `bytes`; else it has its error.
bool in_file(Op& op, uint64_t bytes, const std::string& path);
// Books what a command of the op came to: 0, a status of the drive, or -errno of the kernel.
// True: the op is over and op.result is set. False: send the command for what is left.
bool settle(Op& op, int outcome, const Space& space, const std::string& path, IoCounters& counters);

// "nvme:/dev/ng0n1" or "nvme:/dev/ng0n1@1GiB+64MiB": a namespace, or a range of it.
struct Target {
  std::string device;             // "/dev/ng0n1"
  uint64_t offset = 0;            // where the range begins
  std::optional<uint64_t> bytes;  // none: up to the end
};
bool is_target(std::string_view path);
// One that is named by its PCI address: the engine vfio drives it, or SPDK.
bool is_pci_target(std::string_view path);
// "nvme:spdk:0000:00:04.0": one that SPDK drives; it counts as named by its PCI address, too.
bool is_spdk_target(std::string_view path);
Result<Target> parse_target(std::string_view path);

}  // namespace stoker::nvme
