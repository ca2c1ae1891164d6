// The probe measures a folder's disk, once, and keeps what it found beside the store: whoever plans
// reads it back.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "stoker/io/load.h"

namespace stoker {

struct ProbePoint {
  Load::Kind kind = Load::Kind::read;
  uint64_t block_bytes = 0;
  uint32_t depth = 0;
  double bytes_per_second = 0;
  double latency_us = 0;  // mean time of one operation
};

struct Probe {
  std::string engine;       // which engine measured
  std::string pages;        // of the memory it used: "hugetlb", "transparent" or "small"
  bool direct = true;       // past the page cache
  uint64_t file_bytes = 0;  // of the temporary file
  // into reserved blocks never written before; often slower
  double first_write_bytes_per_second = 0;
  std::vector<ProbePoint> points;

  // The best of all points of that kind; 0: none was measured.
  double best(Load::Kind kind) const;
};

struct ProbeOptions {
  std::string engine = "auto";
  double seconds = 8;  // about how long it may take
  // called on the calling thread
  std::function<void(std::string_view doing, double fraction)> progress = nullptr;
};

// Measures `folder` with a temporary file that is unlinked as soon as it is open. Blocks for about
// options.seconds.
Result<Probe> run_probe(const std::string& folder, const ProbeOptions& options = {});

// FOLDER/stoker.probe.json, replaced atomically; docs/io.md says what is in it.
std::string probe_path(const std::string& folder);
Status save_probe(const std::string& folder, const Probe& probe);
// not_found if there is none, mismatch if another version wrote it, corruption if it is not what we
// write.
Result<Probe> load_probe(const std::string& folder);
// The same as text.
std::string probe_json(const Probe& probe);

}  // namespace stoker
