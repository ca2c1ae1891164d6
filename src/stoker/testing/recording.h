// Replay of recorded I/O: every disk that a power cut could have left behind, and the oracle that
// says which states may be on it.
//
//   Timeline   the states a store went through, each begun and acknowledged by notes in the
//   recording Recorder   runs operations on a store and keeps the Timeline CrashWalk  walks over a
//   recording and hands out crash cases: images of all disks + the states that may be found there
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "stoker/base/mutex.h"
#include "stoker/testing/sim_disk.h"
#include "stoker/testing/store_harness.h"

namespace stoker {

// One state that the store was in: what a crash may return to.
struct Point {
  Version version = 0;
  ModelState objects;
  std::map<std::string, std::pair<Version, ModelState>> snapshots;
};
using Timeline = std::vector<std::shared_ptr<const Point>>;

// Of the points [first, last] of a Timeline one must be found: not older than the newest
// acknowledged, not newer than the newest begun.
struct Admissible {
  size_t first = 0, last = 0;
};

// Value: an index in the Timeline; of `troubled` a set of disks (bit i: the i-th) that count among
// the lost from here on.
enum class Note : uint64_t { begun = 1, durable = 2, troubled = 3 };

// Single-threaded: each operation is a new Point. Failing operations are part of the game: they are
// begun, and not acknowledged.
class Recorder {
 public:
  // Starts from the last point of the timeline, in which the store must be.
  Recorder(SimDisk& disk, Store& store, Timeline& timeline)
      : disk_(disk), store_(store), timeline_(timeline), now_(*timeline.back()) {}

  // Says that the store opened in the newest state, which is thereby durable.
  void opened() { acknowledged(); }

  // One transaction. An empty list of bytes removes the key.
  struct Change {
    std::string key;
    size_t bytes = 0;  // resized to; 0: removed
    size_t offset = 0;
    size_t written = 0;  // bytes written at `offset`
    uint64_t seed = 0;   // of their pattern
  };
  Status commit(const std::vector<Change>& changes, Durability durability) {
    Point next = now_;
    next.version = now_.version + 1;
    STOKER_ASSIGN(auto open, store_.begin());
    std::vector<Bytes> memory;
    for (const Change& change : changes) {
      STOKER_TRY(apply(*open, change, memory));
      apply(next, change);
    }
    begin(std::move(next));
    const auto version = open->commit(durability).wait();
    if (!version) return failed(version.error());
    if (*version != now_.version)
      return fail(Code::mismatch, "the commit has version {} instead of {}", *version,
                  now_.version);
    if (durability == Durability::durable) acknowledged();
    return {};
  }
  // Several transactions, one after the other in the order of the list, none waiting for the one
  // before: they may share a record.
  struct Together {
    std::vector<Change> changes;
    Durability durability = Durability::durable;
  };
  Status commit_together(const std::vector<Together>& list) {
    std::vector<std::unique_ptr<Transaction>> open;
    std::vector<Bytes> memory;
    STOKER_TRY(stage(list, open, memory));
    std::vector<Future<Version>> futures;
    const size_t first = timeline_.size();
    for (size_t i = 0; i < list.size(); ++i) {
      Point next = now_;
      next.version = now_.version + 1;
      for (const Change& part : list[i].changes) apply(next, part);
      begin(std::move(next));
      futures.push_back(open[i]->commit(list[i].durability));
    }
    for (size_t i = 0; i < list.size(); ++i) {
      const auto version = futures[i].wait();
      if (!version) return version.error();
      if (*version != timeline_[first + i]->version)
        return fail(Code::mismatch, "commits have other versions than their order says");
      if (list[i].durability == Durability::durable) acknowledged(first + i);
    }
    return {};
  }
  // Several transactions on different objects that form one batch, of which a crash may keep any:
  // each of them is whole or not at all. `gather` is called when all is staged; what it returns
  // lives until the last commit was called.
  Status commit_batch(const std::vector<Together>& list,
                      const std::function<std::unique_lock<Mutex>()>& gather) {
    std::vector<std::unique_ptr<Transaction>> open;
    std::vector<Bytes> memory;
    STOKER_TRY(stage(list, open, memory));
    auto gathered = gather();
    const Point before = now_;
    const size_t known = timeline_.size();
    for (size_t some = 1; some < size_t{1} << list.size(); ++some) {
      Point next = before;
      for (size_t i = 0; i < list.size(); ++i) {
        if ((some >> i & 1) == 0) continue;
        next.version = before.version + 1 + i;
        for (const Change& part : list[i].changes) apply(next, part);
      }
      begin(std::move(next));  // all of them is the last
    }
    std::vector<Future<Version>> futures;
    for (const auto& each : open) futures.push_back(each->commit(Durability::durable));
    gathered.unlock();
    Status status;
    for (size_t i = 0; i < list.size(); ++i) {
      const auto version = futures[i].wait();
      if (!version && status) status = version.error();
      if (version && *version != before.version + 1 + i)
        return fail(Code::mismatch, "commits have other versions than their order says");
    }
    if (status) {
      acknowledged();
    } else if (store_.info().read_only.empty()) {
      timeline_.resize(known);
      now_ = before;
    }
    return status;
  }
  // A transaction that comes to nothing, while its writes may still be under way.
  Status abandon(const std::vector<Change>& changes) {
    std::vector<Bytes> memory;
    std::vector<Future<void>> writes;
    {
      STOKER_ASSIGN(auto open, store_.begin());
      for (const Change& change : changes) {
        STOKER_TRY(open->resize(change.key, change.bytes));
        memory.push_back(pattern(change.written, change.seed));
        writes.push_back(open->write(change.key, change.offset, slice_of(memory.back())));
      }
    }
    // abandoned writes may succeed or be cancelled
    for (const auto& write : writes) static_cast<void>(write.wait());
    return {};
  }
  Status snapshot(const std::string& name) {
    Point next = now_;
    next.snapshots[name] = {now_.version, now_.objects};
    begin(std::move(next));
    if (const auto status = store_.snapshot(name).wait(); !status) return failed(status.error());
    acknowledged();
    return {};
  }
  Status drop(const std::string& name) {
    Point next = now_;
    next.snapshots.erase(name);
    begin(std::move(next));
    if (const auto status = store_.drop(name).wait(); !status) return failed(status.error());
    acknowledged();
    return {};
  }
  const Point& now() const { return now_; }
  size_t acknowledged_index() const { return acknowledged_; }

 private:
  Status stage(const std::vector<Together>& list, std::vector<std::unique_ptr<Transaction>>& open,
               std::vector<Bytes>& memory) {
    for (const Together& each : list) {
      STOKER_ASSIGN(auto change, store_.begin());
      for (const Change& part : each.changes) STOKER_TRY(apply(*change, part, memory));
      open.push_back(std::move(change));
    }
    return {};
  }
  static Status apply(Transaction& open, const Change& change, std::vector<Bytes>& memory) {
    if (change.bytes == 0) return open.remove(change.key);
    STOKER_TRY(open.resize(change.key, change.bytes));
    if (change.written == 0) return {};
    memory.push_back(pattern(change.written, change.seed));
    return open.write(change.key, change.offset, slice_of(memory.back())).wait();
  }
  static void apply(Point& next, const Change& change) {
    if (change.bytes == 0) {
      next.objects.erase(change.key);
      return;
    }
    ModelObject& object = next.objects[change.key];
    if (object.chunk_bytes == 0) object.chunk_bytes = 64 << 10;
    object.version = next.version;
    object.bytes.resize(change.bytes);
    const Bytes bytes = pattern(change.written, change.seed);
    std::copy(bytes.begin(), bytes.end(),
              object.bytes.begin() + static_cast<ptrdiff_t>(change.offset));
  }
  void begin(Point next) {
    now_ = std::move(next);
    timeline_.push_back(std::make_shared<const Point>(now_));
    disk_.note(static_cast<uint64_t>(Note::begun), timeline_.size() - 1);
  }
  // A store that is still writable has certainly not committed it; one that is not may have, and
  // only opening it again tells.
  Error failed(const Error& error) {
    if (store_.info().read_only.empty()) {
      timeline_.pop_back();
      now_ = *timeline_.back();
    }
    return error;
  }
  void acknowledged() { acknowledged(timeline_.size() - 1); }
  void acknowledged(size_t index) {
    acknowledged_ = index;
    disk_.note(static_cast<uint64_t>(Note::durable), acknowledged_);
  }

  SimDisk& disk_;
  Store& store_;
  Timeline& timeline_;
  Point now_;
  size_t acknowledged_ = 0;
};

// The oracle. The index of the point that the store is in, checked to the last byte, or what is
// wrong.
inline Result<size_t> find_point(Store& store, const Timeline& timeline, Admissible range) {
  const StoreInfo info = store.info();
  std::map<std::string, Version> named;
  for (const SnapshotInfo& snapshot : info.snapshots) named[snapshot.name] = snapshot.version;
  std::string wrong;
  for (size_t i = range.first; i <= range.last; ++i) {
    const Point& point = *timeline[i];
    if (point.version != info.committed || point.snapshots.size() != named.size()) continue;
    const bool same =
        std::all_of(point.snapshots.begin(), point.snapshots.end(), [&](const auto& each) {
          const auto found = named.find(each.first);
          return found != named.end() && found->second == each.second.first;
        });
    if (!same) continue;
    auto whole = holds(store, point.objects);
    for (const auto& [name, snapshot] : point.snapshots) {
      if (whole) whole = holds(store, snapshot.second, name);
    }
    if (whole) return i;
    // two points may share a version: after a failed commit the next one takes its number
    wrong = whole.message();
  }
  if (!wrong.empty()) return fail(Code::corruption, "version {}: {}", info.committed, wrong);
  return fail(Code::corruption,
              "version {} with {} snapshots was found, but only versions {} to {} may come back",
              info.committed, named.size(), timeline[range.first]->version,
              timeline[range.last]->version);
}

using Images = std::map<std::string, SimImage>;

struct CrashCase {
  Images images;
  Admissible admissible;
  std::string what;  // for messages: which writes survived
  // The same moment with the power on: what is durable, and what is under way or only in the disks'
  // caches.
  Images durable;
  std::vector<const SimEvent*> pending;
  uint64_t troubled = 0;
};

// How many cases to make of each moment.
struct CrashEffort {
  size_t all_subsets_up_to = 8;  // writes since the last flush
  size_t samples = 96;           // of subsets, above that
  size_t tears = 3;              // ways to tear the survivors of each subset
  uint64_t keep_one_in = 1;      // of the cases at moments with many subsets, by seed
};

class CrashWalk {
 public:
  // The visitor returns false to stop.
  using Visit = std::function<bool(CrashCase&)>;
  CrashWalk(const std::vector<SimEvent>& events, Images before, Admissible admissible,
            uint64_t seed, CrashEffort effort = {})
      : events_(events),
        durable_(std::move(before)),
        admissible_(admissible),
        random_(seed),
        effort_(effort) {}

  // Each moment at which something new could be on the disks: after each write was submitted
  // (subsets that hold it: the others came before), and after each acknowledgement (which narrows
  // what may be found).
  void run(const Visit& visit) {
    if (!cases({}, false, visit)) return;
    for (size_t i = 0; i < events_.size(); ++i) {
      const SimEvent& event = events_[i];
      switch (event.kind) {
        case SimEvent::Kind::write:
          open_.push_back(i);
          if (!cases(open_, true, visit)) return;
          break;
        case SimEvent::Kind::flush:
          for (const size_t write : event.covers) {
            durable_[event.path].write(events_[write].offset, *events_[write].bytes);
            std::erase(open_, write);
          }
          break;
        case SimEvent::Kind::made:
          break;  // at once, and durable
        case SimEvent::Kind::note:
          if (event.note == static_cast<uint64_t>(Note::begun)) {
            admissible_.last = event.value;
          } else if (event.note == static_cast<uint64_t>(Note::troubled)) {
            troubled_ = event.value;
          } else {
            admissible_ = {event.value, std::max(admissible_.last, event.value)};
            if (!cases(open_, false, visit)) return;
          }
          break;
      }
    }
  }

 private:
  enum class Fate : uint8_t { lost, whole, torn };

  // All (or a sample of) fates of the open writes; `with_last`: only those in which the last one is
  // not lost.
  bool cases(const std::vector<size_t>& open, bool with_last, const Visit& visit) {
    const size_t free_writes = with_last ? open.size() - 1 : open.size();
    std::vector<std::vector<Fate>> all;
    if (open.size() <= effort_.all_subsets_up_to) {
      for (uint64_t subset = 0; subset < uint64_t{1} << free_writes; ++subset) {
        std::vector<Fate> fates(open.size(), Fate::whole);
        for (size_t i = 0; i < free_writes; ++i)
          fates[i] = (subset >> i & 1) != 0 ? Fate::whole : Fate::lost;
        all.push_back(fates);
        for (size_t i = 0; i < effort_.tears; ++i) {
          std::vector<Fate> torn = fates;
          if (tear(torn)) all.push_back(std::move(torn));
        }
      }
    } else {
      for (size_t sample = 0; sample < effort_.samples; ++sample) {
        std::vector<Fate> fates(open.size(), Fate::whole);
        const uint64_t loss = sample % 5;  // from everything survives to nearly nothing does
        for (size_t i = 0; i < free_writes; ++i)
          fates[i] = random_() % 4 < loss ? Fate::lost : Fate::whole;
        if (sample % 2 == 1) tear(fates);
        all.push_back(std::move(fates));
      }
    }
    for (const auto& fates : all) {
      if (all.size() > 16 && effort_.keep_one_in > 1 && random_() % effort_.keep_one_in != 0)
        continue;
      CrashCase made = build(open, fates);
      if (!visit(made)) return false;
    }
    return true;
  }

  // Tears at least one of the survivors.
  bool tear(std::vector<Fate>& fates) {
    std::vector<size_t> survivors;
    for (size_t i = 0; i < fates.size(); ++i) {
      if (fates[i] == Fate::whole) survivors.push_back(i);
    }
    if (survivors.empty()) return false;
    for (const size_t i : survivors) {
      if (random_() % 2 == 0) fates[i] = Fate::torn;
    }
    fates[survivors[random_() % survivors.size()]] = Fate::torn;
    return true;
  }

  CrashCase build(const std::vector<size_t>& open, const std::vector<Fate>& fates) {
    CrashCase made{durable_, admissible_, {}, durable_, {}, troubled_};
    for (size_t i = 0; i < open.size(); ++i) {
      const SimEvent& write = events_[open[i]];
      made.pending.push_back(&write);
      made.what += "-+~"[static_cast<size_t>(fates[i])];
      if (fates[i] == Fate::lost) continue;
      SimImage& image = made.images[write.path];
      if (fates[i] == Fate::whole) {
        image.write(write.offset, *write.bytes);
        continue;
      }
      // Torn: the beginning, the end, or a random half of its sectors.
      const uint64_t mode = random_() % 3;
      const size_t sectors = write.bytes->size() / kSector;
      const size_t cut = random_() % (sectors + 1);
      image.write_torn(write.offset, *write.bytes, [&](size_t sector) {
        if (mode == 2) return random_() % 2 == 0;
        return (mode == 0) == (sector < cut);
      });
    }
    return made;
  }

  const std::vector<SimEvent>& events_;
  Images durable_;
  Admissible admissible_;
  uint64_t troubled_ = 0;
  std::mt19937_64 random_;
  const CrashEffort effort_;
  std::vector<size_t> open_;  // indices of the writes that are not durable
};

}  // namespace stoker
