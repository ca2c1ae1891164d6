// Stories about a ShardCluster on simulated disks. Those at the end crash where one of its flushes
// counts; each returns what is wrong, or nothing.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>

#include "curm/schemes_lab.h"
#include "curm/shard_sim.h"

namespace stoker::curm {

inline std::unique_ptr<CrashCluster> on_shards(const Geometry& geometry, uint64_t seed) {
  return std::make_unique<ShardSim>(geometry, seed);
}

// What a story on shards needs beside the Lab.
struct ShardStory {
  ShardStory(std::string_view scheme, uint64_t seed, int k = 4, int m = 2)
      : lab(by_name(scheme), Form::safe, k, m, 2 * seed, {}, on_shards),
        sim(static_cast<ShardSim&>(lab.cluster())),
        random(seed) {}
  Lab lab;
  ShardSim& sim;
  std::mt19937_64 random;

  void act(int times) {
    for (int i = 0; i < times && lab.act(); ++i) {
    }
  }
  void act_until_the_crash() {
    while (lab.act()) {
    }
  }
  // An update of every data chunk: each node's log goes on.
  Status touch_all() {
    for (int i = 0; i < 2; ++i) {
      for (uint64_t stripe = 0; stripe < 3; ++stripe) {
        for (int position = 0; position < 4; ++position) {
          const Update update{
              {stripe, position}, random() % 8000, Value::of(lab.random_bytes(100))};
          STOKER_TRY(lab.scheme().update(update));
          lab.lay(update);
        }
      }
    }
    return {};
  }
  std::vector<std::string> logs(NodeId node) {
    std::vector<std::string> paths;
    for (int i = 0;
         sim.disk().image(ShardSim::path(node) + "/log." + std::to_string(i)).bytes() != 0; ++i)
      paths.push_back(ShardSim::path(node) + "/log." + std::to_string(i));
    return paths;
  }
  void flip(const std::string& path) {
    sim.disk().flip(path, random() % sim.disk().image(path).bytes(),
                    static_cast<unsigned>(random() % 8));
  }
  // Opens what is there, as it is.
  Status recover() {
    STOKER_TRY(sim.reopen());
    lab.start();
    STOKER_TRY(lab.scheme().recover(sim.lost()));
    return sim.recovered();
  }
  void cut_power() {
    sim.close();
    sim.disk().cut_power(random());
    sim.disk().restore_power();
  }
};

// The process is killed: what it wrote stands in the disks' caches alone. The next one acts by what
// it finds there, and the power goes.
inline std::string killed_story(std::string_view scheme, uint64_t seed) {
  ShardStory story(scheme, seed);
  for (int life = 0; life < 3; ++life) {
    story.sim.kill_at_flush(story.random() % 100);
    story.act_until_the_crash();
    if (!story.sim.crashed()) return "an operation failed by itself";
    if (std::string wrong = story.lab.recover({}, {story.random() % 60}); !wrong.empty())
      return wrong;
  }
  return {};
}

// The power goes, and once more while the cluster is opened, with or without nodes to rebuild.
inline std::string opening_story(std::string_view scheme, uint64_t seed) {
  ShardStory story(scheme, seed);
  story.sim.crash_after(story.random() % 300);
  story.act_until_the_crash();
  const std::set<NodeId> lost = story.lab.random_losses();
  story.sim.restart(lost);
  story.lab.start();
  story.sim.crash_at_transfer(story.random() % 160);
  Status done = story.lab.scheme().recover(lost);
  if (done) done = story.sim.recovered();
  if (!done && !story.sim.crashed()) return done.error().message();
  return story.lab.recover(lost, {});
}

// A disk is away while the others go on without it, and the power goes. Then it is back as it was.
inline std::string stale_story(std::string_view scheme, uint64_t seed) {
  ShardStory story(scheme, seed, 2, 1);
  story.act(15);
  story.sim.close();
  const auto away = static_cast<NodeId>(seed % 3);
  std::map<std::string, SimImage> kept;
  std::vector<std::string> files = story.logs(away);
  for (const char* file : {"/head", "/data", "/parity"})
    files.push_back(ShardSim::path(away) + file);
  for (const std::string& file : files) kept.emplace(file, story.sim.disk().image(file));
  story.sim.disk().unlimit(ShardSim::path(away) + "/");
  if (const Status done = story.recover(); !done) return done.error().message();
  story.act(8);
  story.cut_power();
  story.sim.disk().unlimit(ShardSim::path(away) + "/");
  for (const auto& [file, image] : kept) story.sim.disk().put(file, image);
  if (const Status done = story.recover(); !done) return done.error().message();
  if (story.sim.lost() != std::set<NodeId>{away})
    return "an old copy counts, or another node does not";
  return story.lab.after_recovery();
}

// A cluster is made, and the power goes; or it goes before that is done, and nothing was made, or
// all of it.
inline std::string making_story(uint64_t seed) {
  const Geometry geometry{2, 1, 3, 8192, 3};
  const std::vector<std::string> paths = {"n0", "n1", "n2"};
  const auto disk = std::make_shared<SimDisk>(seed);
  std::mt19937_64 random(seed);
  if (seed % 2 == 0) disk->cut_power_after(random() % 60, random());
  bool made = false;
  {
    const auto loop = loop_on(disk, random());
    made = ShardCluster::make(*loop, paths, geometry, small_options(geometry)).has_value();
  }
  disk->cut_power(random());
  disk->restore_power();
  const auto loop = loop_on(disk, random());
  const auto opened = ShardCluster::open(*loop, paths, small_options(geometry));
  if (opened)
    return (*opened)->replaced().empty() ? std::string()
                                         : "of a new cluster " + (*opened)->troubles()[0];
  const std::string what = opened.error().message();
  const bool never = what.find("there is no node") != std::string::npos ||
                     what.find("never made to the end") != std::string::npos;
  return never && !made ? std::string() : what;
}

// What is made for a node that is to be rebuilt comes behind the head that says so: else a crash
// leaves files that seem to be somebody else's, and opening refuses to touch them.
inline std::string blanking_story(uint64_t seed) {
  ShardStory story("vdl", seed, 2, 1);
  story.act(5);
  story.sim.close();
  story.sim.disk().unlimit("n1/");
  story.sim.disk().start_recording();
  const Status opened = story.sim.reopen();
  const std::vector<SimEvent> events = story.sim.disk().stop_recording();
  if (!opened) return opened.error().message();
  bool durable = false;
  size_t files = 0;
  for (const SimEvent& event : events) {
    const bool head = event.path == "n1/head";
    durable = durable || (head && event.kind == SimEvent::Kind::flush && !event.covers.empty());
    if (event.kind != SimEvent::Kind::made || head || event.path.compare(0, 3, "n1/") != 0)
      continue;
    if (!durable) return "'" + event.path + "' is made before the head of its node is durable";
    ++files;
  }
  return files >= 2 ? std::string() : "the node that is lost was not made again";
}

// Two clients flush a node at once. Neither is answered before what it appended is durable.
inline std::string together_story(uint64_t seed) {
  const Geometry geometry{2, 1, 3, 8192, 3};
  ShardSim sim(geometry, seed);
  std::atomic<int> answered = 0;
  const auto append = [&](uint64_t seq) {
    Round round;
    Errand& errand = round.to(0);
    errand.append({Record::Kind::value,
                   1,
                   seq,
                   {0, 0},
                   {{0, Value::of(std::vector<std::byte>(100))}},
                   {},
                   {}});
    errand.flush();
    if (sim.cluster().run(round)) ++answered;
  };
  // one of them leads by then, and waits for its disk
  constexpr std::chrono::milliseconds kWhile(10);
  auto held = sim.disk().hold();
  std::thread first(append, 1);
  std::this_thread::sleep_for(kWhile);
  std::thread second(append, 2);
  std::this_thread::sleep_for(kWhile);
  const int early = answered;
  held.unlock();
  first.join();
  second.join();
  if (early != 0) return "an update was acknowledged before its disk had taken anything";
  if (answered != 2) return "an update failed by itself";
  sim.restart({});
  const auto found = sim.scan(0);
  if (!found) return found.error().message();
  return found->records.size() == 2 ? std::string() : "an acknowledged record is gone";
}

// What one flush makes durable fills several segments.
inline std::string segments_story(uint64_t seed) {
  constexpr uint64_t kRecords = 30;
  ShardSim sim({2, 1, 3, 8192, 3}, seed);
  Round round;
  Errand& errand = round.to(0);
  for (uint64_t seq = 1; seq <= kRecords; ++seq)
    errand.append({Record::Kind::value,
                   1,
                   seq,
                   {0, 0},
                   {{0, Value::of(std::vector<std::byte>(8000))}},
                   {},
                   {}});
  errand.flush();
  if (const Status done = sim.run(round); !done) return done.error().message();
  sim.restart({});
  const auto found = sim.scan(0);
  if (!found) return found.error().message();
  return found->records.size() == kRecords ? std::string() : "an acknowledged record is gone";
}

// All of them, with one scheme after the other.
inline std::string all_stories(uint64_t seed) {
  const std::string_view scheme = kProtocols[seed % kProtocols.size()];
  const auto told = [&](const char* story, const std::string& wrong) {
    return wrong.empty() ? wrong : std::string(story) + ", " + std::string(scheme) + ": " + wrong;
  };
  std::string wrong = told("power cuts", crash_run(by_name(scheme), seed, {}, on_shards));
  if (wrong.empty()) wrong = told("a kill", killed_story(scheme, seed));
  if (wrong.empty()) wrong = told("a power cut while opening", opening_story(scheme, seed));
  if (wrong.empty()) wrong = told("an old copy", stale_story(scheme, seed));
  if (wrong.empty()) wrong = told("making", making_story(seed));
  if (wrong.empty()) wrong = told("a node made again", blanking_story(seed));
  if (wrong.empty()) wrong = told("two clients", together_story(seed));
  if (wrong.empty()) wrong = told("many records", segments_story(seed));
  return wrong;
}

}  // namespace stoker::curm
