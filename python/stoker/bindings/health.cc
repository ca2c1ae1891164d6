// Store.health(): how a store over several disks is, for the process that has it open: the writer's
// lock keeps all others out.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "convert.h"
#include "stoker/store/coded/coded_store.h"

namespace stoker::python {
namespace {

nb::object to_object(const RepairProgress& doing) {
  if (doing.what.empty()) return nb::none();
  nb::dict out;
  out["what"] = doing.what;
  out["done"] = doing.done;
  out["total"] = doing.total;
  out["bytes"] = doing.bytes;
  return out;
}

nb::object to_object(const coded::LastScrub& last) {
  if (last.ended_at == 0) return nb::none();
  nb::dict out;
  out["ended_at"] = last.ended_at;
  out["found"] = last.found;
  out["lost"] = last.lost;
  return out;
}

// As `stoker scrub --json` has it.
nb::dict to_dict(const ScrubReport& report) {
  nb::dict mended;
  mended["blocks"] = report.blocks;
  mended["header_pages"] = report.pages;
  mended["log_records"] = report.records;
  mended["tables"] = report.tables;
  mended["superblocks"] = report.superblocks;
  nb::dict out;
  out["chunks"] = report.chunks;
  out["bytes"] = report.bytes;
  out["mended"] = mended;
  out["lost"] = report.lost;
  out["lost_unlisted"] = report.unlisted;
  return out;
}

nb::dict to_dict(const coded::Patrol& patrol) {
  nb::dict out;
  out["passes"] = patrol.passes;
  out["last"] = patrol.passes == 0 ? nb::object(nb::none()) : nb::object(to_dict(patrol.last));
  out["found"] = patrol.found;
  out["doing"] = to_object(patrol.doing);
  out["stopped"] = patrol.stopped;
  return out;
}

nb::list to_list(const std::vector<coded::DiskHealth>& disks) {
  nb::list out;
  for (const auto& [path, health] : disks) {
    nb::dict disk;
    disk["path"] = path;
    disk["failed_reads"] = health.failed_reads;
    disk["failed_writes"] = health.failed_puts;
    disk["wrong_blocks"] = health.wrong_blocks;
    disk["last"] = health.last;
    out.append(disk);
  }
  return out;
}

}  // namespace

nb::object health(const PyStore& store) {
  const auto* found = dynamic_cast<const coded::CodedStore*>(&open(store));
  if (found == nullptr) return nb::none();
  const coded::Health health = found->health();
  nb::dict out;
  out["epoch"] = health.epoch;
  out["live"] = health.live;
  out["troubles"] = health.troubles;
  out["disks"] = to_list(health.disks);
  out["affected"] = found->affected();
  out["doing"] = to_object(health.doing);
  out["newer_blocks"] = health.newer_blocks;
  out["decoded_blocks"] = health.decoded_blocks;
  out["mended_blocks"] = health.mended_blocks;
  out["rebuilt_bytes"] = health.rebuilt_bytes;
  out["folds"] = health.folds;
  out["lost_chunks"] = health.lost_chunks;
  out["stuck_stripes"] = health.stuck_stripes;
  out["lost_why"] = health.lost_why;
  out["scrubbed"] = to_object(health.scrubbed);
  out["scrub"] = to_dict(health.patrol);
  return out;
}

}  // namespace stoker::python
