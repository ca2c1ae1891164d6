// Traces of storage requests, as text: MSR Cambridge CSV, CloudPhysics CSV, NFS records as nfsdump
// prints them. Told apart by their first line. Lines that cannot be read are counted and named;
// whether that is an error is the caller's choice.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "stoker/base/result.h"
#include "stoker/classes/classes.h"

namespace stoker::curm {

struct Request {
  uint64_t time_us = 0;  // since the trace began
  uint32_t object = 0;   // a volume, or a file: index of Trace::objects
  bool write = false;
  uint64_t offset = 0, bytes = 0;
};

// A file that was made, or removed. Only NFS records tell of such.
struct FileEvent {
  uint64_t before = 0;              // this request; as many as there are: after all
  bool made = false;                // else removed
  uint32_t object = 0, folder = 0;  // of folders: a number from 1 on
  std::string path;
  uint64_t bytes = 0;  // announced when it was made; 0: none
};

// As the classes see it.
inline Access access_of(const Request& request) {
  return {request.object, request.write, request.offset, request.bytes};
}

struct Trace {
  std::string name;
  std::string format;  // msr, cloudphysics, nfs
  std::vector<std::string> objects;
  std::vector<Request> requests;
  std::vector<FileEvent> events;  // in order
  uint64_t others = 0;            // operations that are known, and neither read nor write: left out
  uint64_t malformed = 0;
  std::vector<std::string> complaints;  // of the first few malformed lines: where and why
};

inline constexpr uint64_t kRequestBytesMax = uint64_t{1} << 30;
inline constexpr uint64_t kOffsetMax = uint64_t{1} << 50;

// Lenient: malformed lines are skipped. Else the first of them is the error, with their count.
Result<Trace> parse_trace(std::string name, std::string_view text, bool lenient);
Result<Trace> read_trace(const std::string& path, bool lenient);
// As MSR lines, which every tool of the field reads. Objects are the disks of one host.
std::string msr_text(const Trace& trace);
// As nfsdump prints calls, and the answers that name files.
std::string nfs_text(const Trace& trace);

// Shows the classes all of a trace. Its objects are the files where it tells of them being made,
// else pieces of so many bytes of its volumes.
void show(const Trace& trace, uint64_t piece_bytes, ClassTable& classes);

}  // namespace stoker::curm
