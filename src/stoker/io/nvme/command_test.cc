#include "stoker/io/nvme/command.h"

#include <gtest/gtest.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "stoker/base/bytes.h"
#include "stoker/io/loop.h"
#include "stoker/io/nvme/device.h"

namespace stoker::nvme {
namespace {

using Answer = std::array<std::byte, kIdentifyBytes>;

template <typename Word>
void put(Answer& answer, size_t at, Word word) {
  std::memcpy(answer.data() + at, &word, sizeof word);
}

// A namespace of `blocks`, in a format of 2^shift bytes a block.
Answer answer_of_space(uint64_t blocks, uint8_t shift, uint16_t metadata = 0) {
  Answer answer{};
  put(answer, 0, blocks);
  put<uint8_t>(answer, 26, 2);
  put(answer, 128 + 4 * 2, metadata);
  put(answer, 128 + 4 * 2 + 2, shift);
  return answer;
}

Op op_of(Op::Kind kind, uint64_t offset, uint64_t bytes) {
  static std::array<std::byte, 4096> memory;
  Op op;
  op.kind = kind;
  op.offset = offset;
  op.bytes = Slice{memory.data(), bytes};
  return op;
}

TEST(NvmeCommand, ReadsWhatAControllerIs) {
  Answer answer{};
  std::memcpy(answer.data() + 4, "SERIAL1             ", 20);
  std::memcpy(answer.data() + 24, "A Drive                                 ", 40);
  put<uint8_t>(answer, 77, 5);
  const Controller controller = read_controller(answer);
  EXPECT_EQ(controller.serial, "SERIAL1");
  EXPECT_EQ(controller.model, "A Drive");
  EXPECT_EQ(controller.transfer_bytes, 128 * kKiB);
}

TEST(NvmeCommand, KnowsTheFormatsItCanUseAndSaysWhichNot) {
  for (const uint8_t shift : {uint8_t{9}, uint8_t{12}}) {
    const auto space = read_space(answer_of_space(1000, shift), 3, {});
    ASSERT_TRUE(space) << space.error().message();
    EXPECT_EQ(space->block_bytes, 1U << shift);
    EXPECT_EQ(space->bytes(), 1000ULL << shift);
    EXPECT_EQ(space->number, 3U);
  }
  EXPECT_EQ(read_space(answer_of_space(1000, 9, 8), 1, {}).error().code, Code::unsupported);
  EXPECT_EQ(read_space(answer_of_space(1000, 16), 1, {}).error().code, Code::unsupported);
  EXPECT_EQ(read_space(answer_of_space(0, 9), 1, {}).error().code, Code::not_found);
}

TEST(NvmeCommand, SplitsAtWhatOneCommandMoves) {
  Controller controller;
  controller.transfer_bytes = 128 * kKiB;
  const Space space = *read_space(answer_of_space(1 << 20, 9), 1, controller);
  Op op = op_of(Op::Kind::write, 1 * kMiB, 300 * kKiB);
  IoCounters counters;
  std::vector<std::pair<uint32_t, uint32_t>> commands;
  do {
    const Command command = command_of(op, space, 4 * kGiB);
    EXPECT_EQ(command.opcode, 1);
    EXPECT_EQ(command.data, op.bytes.data + op.moved);
    commands.emplace_back(command.word10, command.word12 + 1);
    EXPECT_EQ(command.bytes, (command.word12 + 1) * 512);
  } while (!settle(op, 0, space, "d", counters));
  const uint32_t first = (4 * kGiB + kMiB) / 512;
  const std::vector<std::pair<uint32_t, uint32_t>> expected = {
      {first, 256}, {first + 256, 256}, {first + 512, 88}};
  EXPECT_EQ(commands, expected);
  EXPECT_EQ(*op.result, 300 * kKiB);
  EXPECT_EQ(counters.writes.get(), 1U);
  EXPECT_EQ(counters.written_bytes.get(), 300 * kKiB);
}

TEST(NvmeCommand, AddressesBeyond32BitsOfBlocks) {
  const Space space = *read_space(answer_of_space(1ULL << 40, 9), 1, {});
  const Op op = op_of(Op::Kind::read, (1ULL << 32) * 512 + 4096, 4096);
  const Command command = command_of(op, space, 0);
  EXPECT_EQ(command.opcode, 2);
  EXPECT_EQ(command.word10, 8U);
  EXPECT_EQ(command.word11, 1U);
}

TEST(NvmeCommand, TrimsInPiecesOf65536Blocks) {
  const Space space = *read_space(answer_of_space(1 << 20, 12), 1, {});
  Op op = op_of(Op::Kind::trim, 0, 600 * kMiB);
  IoCounters counters;
  int commands = 0;
  do {
    EXPECT_EQ(command_of(op, space, 0).opcode, 8);
    EXPECT_EQ(command_of(op, space, 0).bytes, 0U);
    ++commands;
  } while (!settle(op, 0, space, "d", counters));
  EXPECT_EQ(commands, 3);
  EXPECT_EQ(*op.result, 600 * kMiB);
}

TEST(NvmeCommand, StatusesAreSentencesThatNameThePlace) {
  const Space space = *read_space(answer_of_space(1 << 20, 9), 1, {});
  IoCounters counters;
  const auto error_of = [&](int status) {
    Op op = op_of(Op::Kind::read, 8192, 4096);
    EXPECT_TRUE(settle(op, status, space, "the drive", counters));
    EXPECT_FALSE(op.result);
    EXPECT_NE(op.result.error().what.find("4096 bytes at 8192 of 'the drive'"), std::string::npos);
    return op.result.error();
  };
  EXPECT_NE(error_of(0x281).what.find("media error"), std::string::npos);
  EXPECT_EQ(error_of(0x281).code, Code::io);
  EXPECT_EQ(error_of(0x4281).what, error_of(0x281).what)
      << "the bit 'do not retry' is not a status";
  EXPECT_NE(error_of(0x082).what.find("not ready"), std::string::npos);
  EXPECT_NE(error_of(0x007).what.find("aborted"), std::string::npos);
  EXPECT_EQ(error_of(0x081).code, Code::out_of_space);
  EXPECT_EQ(error_of(0x020).code, Code::read_only);
  EXPECT_NE(error_of(0x2F3).what.find("media status 243"), std::string::npos);
  EXPECT_NE(error_of(0x7C1).what.find("vendor's status 193"), std::string::npos);
  EXPECT_EQ(error_of(-ENODEV).code, Code::io);
  EXPECT_EQ(counters.reads.get(), 0U);
  Op again = op_of(Op::Kind::read, 0, 4096);
  EXPECT_FALSE(settle(again, -EINTR, space, "d", counters)) << "is to be repeated";
}

TEST(NvmeTarget, IsANamespaceOrARangeOfIt) {
  const auto whole = parse_target("nvme:/dev/ng0n1");
  ASSERT_TRUE(whole);
  EXPECT_EQ(whole->device, "/dev/ng0n1");
  EXPECT_EQ(whole->offset, 0U);
  EXPECT_FALSE(whole->bytes);
  const auto range = parse_target("nvme:/dev/ng0n1@1GiB+64MiB");
  ASSERT_TRUE(range) << range.error().message();
  EXPECT_EQ(range->device, "/dev/ng0n1");
  EXPECT_EQ(range->offset, 1 * kGiB);
  EXPECT_EQ(range->bytes, 64 * kMiB);
  for (const char* bad : {"nvme:", "nvme:@0+4096", "nvme:/d@", "nvme:/d@4096", "nvme:/d@0+0",
                          "nvme:/d@1+4096", "nvme:/d@0+5000", "nvme:/d@x+4096"}) {
    const auto refused = parse_target(bad);
    ASSERT_FALSE(refused) << bad;
    EXPECT_EQ(refused.error().code, Code::invalid_argument);
    EXPECT_NE(refused.error().what.find("nvme:/dev/ng0n1@1GiB+64MiB"), std::string::npos);
  }
}

TEST(NvmeTarget, AnEngineThatSendsNoCommandsSaysSo) {
  const auto engine = make_engine("posix", 4);
  ASSERT_TRUE(engine);
  const auto file = (*engine)->open({.path = "nvme:/dev/ng0n1"});
  ASSERT_FALSE(file);
  EXPECT_EQ(file.error().code, Code::unsupported);
  EXPECT_NE(file.error().what.find("uring"), std::string::npos);
}

TEST(NvmeDrives, AreListedWithTheirDriversAndDevices) {
  namespace fs = std::filesystem;
  const fs::path sys = fs::path(testing::TempDir()) / ("nvme-sys-" + std::to_string(getpid()));
  const auto device = [&](const std::string& address, const std::string& pci_class) {
    const fs::path folder = sys / "bus/pci/devices" / address;
    fs::create_directories(folder);
    std::ofstream(folder / "class") << pci_class << "\n";
    return folder;
  };
  EXPECT_EQ(list_drives(sys)->size(), 0U) << "a machine without PCI has none";
  device("0000:00:03.0", "0x020000");
  const fs::path used = device("0000:00:05.0", "0x010802"),
                 bound = device("0000:00:04.0", "0x010802");
  fs::create_directory_symlink("../drivers/nvme", used / "driver");
  fs::create_directory_symlink("../drivers/vfio-pci", bound / "driver");
  fs::create_directories(used / "nvme/nvme0/ng0n2");
  fs::create_directories(used / "nvme/nvme0/ng0n1");
  fs::create_directories(used / "nvme/nvme0/nvme0n1");
  std::ofstream(used / "nvme/nvme0/model") << "A Drive   \n";
  const auto drives = list_drives(sys);
  ASSERT_TRUE(drives) << drives.error().message();
  ASSERT_EQ(drives->size(), 2U);
  EXPECT_EQ((*drives)[0].address, "0000:00:04.0");
  EXPECT_EQ((*drives)[0].driver, "vfio-pci");
  EXPECT_EQ((*drives)[1].driver, "nvme");
  EXPECT_EQ((*drives)[1].model, "A Drive");
  EXPECT_EQ((*drives)[1].devices, (std::vector<std::string>{"/dev/ng0n1", "/dev/ng0n2"}));
  fs::remove_all(sys);
}

}  // namespace
}  // namespace stoker::nvme
