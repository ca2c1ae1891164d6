#include "curm/shard_round.h"

#include <algorithm>
#include <cstring>

#include "stoker/base/crc32c.h"

namespace stoker::curm {
namespace {

bool whole_blocks(const Step& step) {
  return is_aligned(step.offset, kShardBlock) && is_aligned(step.value->size(), kShardBlock);
}

std::string name_of(const Chunk& chunk) {
  return "chunk " + std::to_string(chunk.position) + " of stripe " + std::to_string(chunk.stripe);
}

}  // namespace

Status ShardRound::run() {
  std::vector<Runner> runners;
  for (Errand& errand : round_.errands) {
    if (!errand.steps.empty()) runners.push_back({.errand = &errand});
  }
  for (;;) {
    Wave wave(cluster_.loop_, round_.background);
    for (Runner& runner : runners) STOKER_TRY(advance(runner, wave));
    if (!wave.moved) return {};
    STOKER_TRY(wave.batch.run());
    for (const auto& after : wave.after) STOKER_TRY(after());
    if (!wave.flushes.empty()) STOKER_TRY(cluster_.flush(wave.flushes));
  }
}

// Up to what has to be waited for.
Status ShardRound::advance(Runner& runner, Wave& wave) {
  std::deque<Step>& steps = runner.errand->steps;
  for (; runner.next < steps.size(); ++runner.next) {
    Step& step = steps[runner.next];
    wave.moved = true;
    switch (step.kind) {
      case Step::Kind::read:
      case Step::Kind::derive:
        return reads(runner, wave);
      case Step::Kind::write:
        return writes(runner, wave);
      case Step::Kind::append: {
        STOKER_TRY(append(runner, step, wave));
        if (step.place->reserved) {  // a write of its own
          ++runner.next;
          return {};
        }
        break;
      }
      case Step::Kind::mark:
        mark(step, wave);
        ++runner.next;
        return {};
      case Step::Kind::flush:
        if (!round_.background) count([](Counts& counts) { ++counts.flushes; });
        wave.flushes.insert(runner.errand->node);
        ++runner.next;
        return {};
      case Step::Kind::release:
        cluster_.node(runner.errand->node).log->release(step.released, step.seq);
        break;
    }
  }
  return {};
}

// ---- reads
// -------------------------------------------------------------------------------------------------

// What is read in a row is read at once; what is computed of it, behind that, in order.
Status ShardRound::reads(Runner& runner, Wave& wave) {
  std::deque<Step>& steps = runner.errand->steps;
  for (; runner.next < steps.size(); ++runner.next) {
    Step& step = steps[runner.next];
    if (step.kind == Step::Kind::derive) {
      wave.after.push_back([&step] {
        *step.value = step.compute();
        return Status();
      });
    } else if (step.kind == Step::Kind::read) {
      STOKER_TRY(read(runner, step, wave));
    } else {
      break;
    }
  }
  return {};
}

Status ShardRound::read(Runner& runner, Step& step, Wave& wave) {
  uint64_t bytes = 0;
  bool asks = false;
  const auto reserved = [](const Step::Part& part) { return part.logged && part.place.reserved; };
  for (const Step::Part& part : step.parts) {
    bytes += part.bytes;
    asks = asks || !reserved(part);
  }
  count([&](Counts& counts) {
    (round_.background ? counts.background_payload_bytes : counts.payload_bytes) += bytes;
    if (asks) ++(round_.background ? counts.background_reads : counts.reads);
  });
  if (!asks && !step.parts.empty()) return read_reserved(runner, step, wave);
  const auto out = std::make_shared<std::vector<std::byte>>(bytes);
  uint64_t at = 0;
  for (const Step::Part& part : step.parts) {
    const std::span<std::byte> into = std::span(*out).subspan(at, part.bytes);
    at += part.bytes;
    if (part.logged) {
      STOKER_TRY(read_record(part, into, wave));
      continue;
    }
    if (cluster_.geometry().node(step.chunk) != runner.errand->node)
      return fail(Code::unsupported,
                  "{} is asked of a node that it does not belong on: spares are modelled only",
                  name_of(step.chunk));
    if (part.offset + part.bytes > cluster_.geometry().chunk_bytes)
      return fail(Code::invalid_argument, "a read goes beyond {}", name_of(step.chunk));
    if (runner.whole.count(step.chunk) == 0) {
      read_base(step.chunk, part.offset, into, Torn::refused, wave);
    } else {
      wave.after.push_back([&runner, chunk = step.chunk, from = part.offset, into] {
        std::memcpy(into.data(), runner.whole[chunk].data() + from, into.size());
        return Status();
      });
    }
  }
  wave.after.push_back([&step, out] {
    *step.value = Value::of(std::move(*out));
    return Status();
  });
  return {};
}

void ShardRound::read_base(const Chunk& chunk, uint64_t offset, std::span<std::byte> into,
                           Torn torn, Wave& wave) {
  if (into.empty()) return;
  Node& where = node(chunk);
  ShardCluster::Header& header = cluster_.header(where, chunk);
  const uint64_t first = offset / kShardBlock,
                 end = (offset + into.size() + kShardBlock - 1) / kShardBlock;
  bool blank = true;
  for (uint64_t block = first; block < end; ++block)
    blank = blank && header.blocks[block] == 0 && !header.flux[block];
  if (blank) {
    std::fill(into.begin(), into.end(), std::byte{0});
    return;
  }
  AlignedBytes& bytes = wave.memory.emplace_back((end - first) * kShardBlock);
  wave.batch.read(cluster_.file_of(where, chunk), cluster_.layout_.block_at(chunk, first),
                  bytes.slice());
  wave.after.push_back([&header, &bytes, &where, chunk, first, into, offset, torn]() -> Status {
    STOKER_TRY(check_blocks(header, where, chunk, first, bytes.span(), torn));
    std::memcpy(into.data(), bytes.data() + offset - first * kShardBlock, into.size());
    return {};
  });
}

// What is read is what was written, or it is an error; but for a block that is to be overwritten in
// part where that was begun before a crash.
Status ShardRound::check_blocks(const ShardCluster::Header& header, const Node& where,
                                const Chunk& chunk, uint64_t first, std::span<std::byte> bytes,
                                Torn torn) {
  for (uint64_t block = first; (block - first) * kShardBlock < bytes.size(); ++block) {
    const std::span<std::byte> each = bytes.subspan((block - first) * kShardBlock, kShardBlock);
    if (torn == Torn::taken && header.flux[block]) continue;
    if (header.blocks[block] == 0) {
      std::fill(each.begin(), each.end(), std::byte{0});
    } else if (header.blocks[block] != block_mark(each)) {
      return fail(Code::corruption,
                  "block {} of {} in '{}' differs from its checksum: open the cluster again, which "
                  "rebuilds this node from the others",
                  block, name_of(chunk), where.path);
    }
  }
  return {};
}

Status ShardRound::read_record(const Step::Part& part, std::span<std::byte> into, Wave& wave) {
  if (into.empty()) return {};
  Node& where = cluster_.node(part.place.node);
  const auto record = where.log->find(part.place.id);
  if (!record)
    return fail(Code::not_found, "a record is read that was released, or that nobody flushed");
  if (part.offset + part.bytes > record->bytes)
    return fail(Code::invalid_argument, "a read goes beyond its record");
  const uint64_t first = part.offset / kShardBlock,
                 end = (part.offset + part.bytes + kShardBlock - 1) / kShardBlock;
  AlignedBytes& bytes = wave.memory.emplace_back((end - first) * kShardBlock);
  wave.batch.read(record->file, record->at + first * kShardBlock, bytes.slice());
  wave.after.push_back(
      [&bytes, &where, record = *record, first, into, from = part.offset]() -> Status {
        const std::vector<uint32_t> crcs = block_crcs(bytes.span());
        if (!std::equal(crcs.begin(), crcs.end(),
                        record.crcs.begin() + static_cast<ptrdiff_t>(first))) {
          return fail(Code::corruption,
                      "a record in the log of '{}' differs from its checksum: open the cluster "
                      "again, which rebuilds this node from the others",
                      where.path);
        }
        std::memcpy(into.data(), bytes.data() + from - first * kShardBlock, into.size());
        return {};
      });
  return {};
}

// Records that are reserved behind a chunk are read in one request with it, and it is kept for the
// reads to come.
Status ShardRound::read_reserved(Runner& runner, Step& step, Wave& wave) {
  const ShardLayout& layout = cluster_.layout_;
  Node& where = node(step.chunk);
  ShardCluster::Header& header = cluster_.header(where, step.chunk);
  std::vector<StoredRecord> records;
  uint64_t end = layout.reserve_at(step.chunk);
  for (const Step::Part& part : step.parts) {
    const auto record = where.log->find(part.place.id);
    if (!record) return fail(Code::not_found, "a record is read that was released");
    end = std::max(end, record->at + record->crcs.size() * kShardBlock);
    records.push_back(*record);
  }
  const uint64_t begin = layout.block_at(step.chunk, 0);
  AlignedBytes& bytes = wave.memory.emplace_back(end - begin);
  wave.batch.read(where.parity_file, begin, bytes.slice());
  runner.whole[step.chunk];
  wave.after.push_back([&runner, &step, &bytes, &header, &where, &layout, begin,
                        records = std::move(records)]() -> Status {
    std::vector<std::byte> out;
    for (size_t i = 0; i < records.size(); ++i) {
      const std::span<std::byte> stored =
          bytes.span().subspan(records[i].at - begin, records[i].crcs.size() * kShardBlock);
      if (block_crcs(stored) != records[i].crcs)
        return fail(Code::corruption,
                    "a record behind {} in '{}' differs from its checksum: open the cluster again, "
                    "which rebuilds this node from the others",
                    name_of(step.chunk), where.path);
      const Step::Part& part = step.parts[i];
      out.insert(out.end(), stored.begin() + static_cast<ptrdiff_t>(part.offset),
                 stored.begin() + static_cast<ptrdiff_t>(part.offset + part.bytes));
    }
    *step.value = Value::of(std::move(out));
    STOKER_TRY(check_blocks(header, where, step.chunk, 0,
                            bytes.span().first(layout.geometry.chunk_bytes), Torn::refused));
    runner.whole[step.chunk].assign(
        bytes.span().begin(),
        bytes.span().begin() + static_cast<ptrdiff_t>(layout.geometry.chunk_bytes));
    return {};
  });
  return {};
}

// ---- writes
// -------------------------------------------------------------------------------------------------

// Whole blocks that do not meet are written at once; a part of a block is read, laid over, and
// written as a block.
Status ShardRound::writes(Runner& runner, Wave& wave) {
  std::deque<Step>& steps = runner.errand->steps;
  std::map<Chunk, std::vector<std::pair<uint64_t, uint64_t>>> taken;
  runner.whole.clear();
  for (bool first = true;
       runner.next < steps.size() && steps[runner.next].kind == Step::Kind::write; first = false) {
    Step& step = steps[runner.next];
    const uint64_t end = step.offset + step.value->size();
    if (cluster_.geometry().node(step.chunk) != runner.errand->node)
      return fail(Code::unsupported,
                  "{} is written on a node that it does not belong on: spares are modelled only",
                  name_of(step.chunk));
    if (end > cluster_.geometry().chunk_bytes)
      return fail(Code::invalid_argument, "a write goes beyond {}", name_of(step.chunk));
    if (!runner.aligned) {
      if (!whole_blocks(step) && !first) break;
      count([&](Counts& counts) {
        (round_.background ? counts.background_payload_bytes : counts.payload_bytes) +=
            step.value->size();
        ++(round_.background ? counts.background_writes : counts.random_writes);
      });
    }
    if (!whole_blocks(step)) {
      align(runner, step, wave);
      return {};
    }
    auto& others = taken[step.chunk];
    if (std::any_of(others.begin(), others.end(), [&](const auto& other) {
          return step.offset < other.second && other.first < end;
        })) {
      runner.aligned = true;  // counted, and next
      break;
    }
    others.emplace_back(step.offset, end);
    write(step.chunk, step.offset, *step.value, wave);
    runner.aligned = false;
    ++runner.next;
  }
  return {};
}

void ShardRound::align(Runner& runner, Step& step, Wave& wave) {
  const uint64_t begin = align_down(step.offset, kShardBlock),
                 end = align_up(step.offset + step.value->size(), kShardBlock);
  const auto out = std::make_shared<std::vector<std::byte>>(end - begin);
  read_base(step.chunk, begin, *out, Torn::taken, wave);
  runner.aligned = true;
  wave.after.push_back([&step, out, begin] {
    std::memcpy(out->data() + step.offset - begin, step.value->bytes().data(), step.value->size());
    step.value = std::make_shared<Value>(Value::of(std::move(*out)));
    step.offset = begin;
    return Status();
  });
}

void ShardRound::write(const Chunk& chunk, uint64_t offset, const Value& value, Wave& wave) {
  if (value.size() == 0) return;
  Node& where = node(chunk);
  ShardCluster::Header& header = cluster_.header(where, chunk);
  AlignedBytes& bytes = wave.memory.emplace_back(value.size());
  std::memcpy(bytes.data(), value.bytes().data(), value.size());
  wave.batch.write(cluster_.file_of(where, chunk),
                   cluster_.layout_.block_at(chunk, offset / kShardBlock), bytes.slice());
  wave.after.push_back([this, &header, &bytes, &where, chunk, offset] {
    for (uint64_t at = 0; at < bytes.size(); at += kShardBlock) {
      header.blocks[(offset + at) / kShardBlock] =
          block_mark(bytes.span().subspan(at, kShardBlock));
      header.flux[(offset + at) / kShardBlock] = false;
    }
    changed(where, chunk);
    return Status();
  });
}

void ShardRound::changed(Node& node, const Chunk& chunk) {
  const std::lock_guard lock(cluster_.mutex_);
  (cluster_.layout_.is_data(chunk) ? node.data_dirty : node.parity_dirty) = true;
  ++node.changes;
}

Status ShardRound::append(Runner& runner, Step& step, Wave& wave) {
  const Record record = step.record();
  Node& where = cluster_.node(runner.errand->node);
  count([&](Counts& counts) {
    (round_.background ? counts.background_payload_bytes : counts.payload_bytes) +=
        record.payload_bytes();
    (round_.background ? counts.background_framing_bytes : counts.framing_bytes) +=
        kRecordHeaderBytes;
    if (round_.background) ++counts.background_writes;
  });
  const auto count_write = [this](uint64_t Counts::*which) {
    if (!round_.background) count([which](Counts& counts) { ++(counts.*which); });
  };
  uint64_t id = 0;
  if (step.reserved) {
    if (auto reserved = where.log->reserve(step.chunk, record, id)) {
      AlignedBytes& bytes = wave.memory.emplace_back(std::move(reserved->bytes));
      wave.batch.write(reserved->file, reserved->offset, bytes.slice());
      wave.after.push_back([this, &where, chunk = step.chunk] {
        changed(where, chunk);
        return Status();
      });
      *step.place = {runner.errand->node, id, true};
      count_write(&Counts::random_writes);
      return {};
    }
  }
  // Where frames have used up the reserve (updates of less than a block), the log takes it.
  *step.place = {runner.errand->node, where.log->queue(record), false};
  count_write(&Counts::sequential_writes);
  const std::lock_guard lock(cluster_.mutex_);
  ++where.changes;
  return {};
}

void ShardRound::mark(const Step& step, Wave& wave) {
  const ShardLayout& layout = cluster_.layout_;
  Node& where = node(step.chunk);
  ShardCluster::Header& header = cluster_.header(where, step.chunk);
  header.folded = std::max(header.folded, step.seq);
  if (step.said) header.said = {step.seq, *step.said};
  ++header.counter;
  header.flux.assign(layout.blocks(), false);
  const uint64_t bytes = layout.header_bytes();
  AlignedBytes& copies = wave.memory.emplace_back(2 * bytes);
  encode_header(layout, where.head.incarnation, step.chunk, header, copies.span().first(bytes));
  std::memcpy(copies.data() + bytes, copies.data(), bytes);
  wave.batch.write(cluster_.file_of(where, step.chunk),
                   layout.header_at(step.chunk, header.counter), copies.slice());
  wave.after.push_back([this, &where, chunk = step.chunk] {
    changed(where, chunk);
    return Status();
  });
  count([&](Counts& counts) {
    (round_.background ? counts.background_framing_bytes : counts.framing_bytes) +=
        kChunkHeaderBytes;
  });
}

}  // namespace stoker::curm
