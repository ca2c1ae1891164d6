// The plays whose crashes are enumerated.
#include "coded_enumeration.h"

namespace stoker {
namespace {

Status overlapping(Stage& on) {
  STOKER_TRY(on.open());
  STOKER_TRY(on.commit({{"a", 250'000, 8'192, 8'192, 11}}));
  STOKER_TRY(on.commit({{"a", 250'000, 12'288, 8'192, 12}}));
  return on.commit({{"a", 250'000, 10'000, 100, 13}});
}

Status fold(Stage& on) {
  STOKER_TRY(on.open());
  STOKER_TRY(on.commit({{"a", 250'000, 8'192, 8'192, 21}}));
  STOKER_TRY(on.commit({{"b", 200'000, 0, 4'096, 22}}));
  STOKER_TRY(on.fold());
  STOKER_TRY(on.commit({{"a", 250'000, 12'288, 4'096, 23}}));
  return on.fold();
}

Status update_during_a_fold(Stage& on) {
  STOKER_TRY(on.open());
  STOKER_TRY(on.commit({{"a", 250'000, 8'192, 8'192, 24}}));
  STOKER_TRY(on.commit_during_a_fold(
      {{{"a", 250'000, 10'000, 4'096, 25}}, {{"b", 200'000, 0, 4'096, 26}}}));
  STOKER_TRY(on.commit_during_a_fold({{{"a", 250'000, 8'192, 4'096, 27}}}));
  return on.fold();
}

Status two_chunks_at_one_offset(Stage& on) {
  STOKER_TRY(on.open());
  STOKER_TRY(on.commit({{"a", 250'000, 4'096, 4'096, 31}}));
  STOKER_TRY(on.commit({{"a", 250'000, 65'536 + 4'096, 4'096, 32}}));
  STOKER_TRY(on.fold());
  STOKER_TRY(on.commit({{"a", 250'000, 65'536 + 4'096, 4'096, 33}}));
  return on.fold();
}

Status transaction(Stage& on) {
  STOKER_TRY(on.open());
  STOKER_TRY(on.commit({{"a", 250'000, 0, 4'096, 41},
                        {"a", 250'000, 131'072, 9'000, 46},
                        {"b", 200'000, 100'000, 9'000, 42}}));
  STOKER_TRY(on.commit({{"a", 250'000, 60'000, 20'000, 43}, {"c", 0}}));
  STOKER_TRY(on.commit({{"c", 70'000, 10, 60'000, 44}, {"b", 150'000}}));
  return on.commit({{"b", 200'000, 190'000, 10'000, 45}});
}

Status whole_objects(Stage& on) {
  STOKER_TRY(on.open());
  STOKER_TRY(on.commit({{"a", 250'000, 0, 250'000, 51}}));
  STOKER_TRY(on.commit({{"a", 250'000, 4'096, 4'096, 52}}));
  STOKER_TRY(on.commit({{"a", 300'000, 0, 300'000, 53}}));
  STOKER_TRY(on.fold());
  STOKER_TRY(on.commit({{"a", 0}}));
  return on.commit({{"d", 250'000, 0, 250'000, 54}});
}

Status full_logs(Stage& on) {
  STOKER_TRY(on.open());
  STOKER_TRY(on.commit({{"early", 70'000, 0, 70'000, 60}}));  // that no later COMMIT names
  for (uint64_t i = 0; i < 30; ++i)
    STOKER_TRY(on.commit({{"a", 250'000, (i * 7 % 60) * 4'096, 4'096, 100 + i}}));
  for (uint64_t i = 0; i < 25; ++i)
    STOKER_TRY(on.commit({{"c", 5'000 + i, 0, 5'000 + i, 200 + i},
                          {"b", 200'000, (i % 40) * 4'096, 4'096, 300 + i}}));
  return {};
}

// Nothing of it is folded, and each commit has a later one behind it.
Status updates(Stage& on) {
  STOKER_TRY(on.open());
  STOKER_TRY(on.commit({{"a", 250'000, 8'192, 8'192, 71}}));
  STOKER_TRY(on.commit({{"a", 250'000, 65'536 + 4'096, 4'096, 72}}));
  STOKER_TRY(on.commit({{"a", 250'000, 131'072, 4'096, 73}, {"b", 200'000, 8'192, 4'096, 74}}));
  STOKER_TRY(on.commit({{"b", 200'000, 0, 4'096, 75}}));
  return on.commit({{"a", 250'000, 0, 4'096, 76}});
}

// A shard misses updates and a fold, is back, and is resynced while there are newer blocks in the
// logs.
Status repair(Stage& on) {
  on.take_away(0);
  STOKER_TRY(on.open());
  STOKER_TRY(on.commit({{"a", 250'000, 0, 20'000, 61}}));
  STOKER_TRY(on.commit({{"a", 250'000, 65'536, 20'000, 62}, {"b", 200'000, 0, 9'000, 63}}));
  STOKER_TRY(on.fold());
  STOKER_TRY(on.commit({{"a", 250'000, 4'096, 8'192, 64}}));
  on.close();
  on.bring_back(0);
  STOKER_TRY(on.open());
  STOKER_TRY(on.repair());
  on.troubled(0);
  return on.commit({{"a", 250'000, 8'192, 4'096, 65}});
}

Status absent_then_back(Stage& on) {
  STOKER_TRY(on.open());
  STOKER_TRY(on.commit({{"a", 250'000, 0, 4'096, 66}}));
  on.close();
  on.take_away(1);
  STOKER_TRY(on.open());
  STOKER_TRY(on.commit({{"a", 250'000, 4'096, 4'096, 67}}));
  STOKER_TRY(on.commit({{"c", 9'000, 0, 9'000, 68}}));
  on.close();
  on.bring_back(1);
  STOKER_TRY(on.open());
  STOKER_TRY(on.commit({{"a", 250'000, 0, 8'192, 69}}));
  STOKER_TRY(on.repair());
  on.troubled(0);
  return on.fold();
}

}  // namespace

Result<std::unique_ptr<coded::CodedStore>> open_store(coded::CodedWorld& world) {
  StoreOptions options;
  options.create = true;
  options.capacity_bytes = 3 << 20;
  options.chunk_bytes = 64 << 10;
  options.objects_max = 16;
  return world.open_coded(options);
}

// Two objects of some chunks each, and one that ends in its second block.
Status prepare(Stage& on) {
  STOKER_TRY(on.open());
  STOKER_TRY(on.commit(
      {{"a", 250'000, 0, 250'000, 1}, {"b", 200'000, 0, 200'000, 2}, {"c", 5'000, 0, 5'000, 3}}));
  on.close();
  return {};
}

Status Stage::open() {
  STOKER_ASSIGN(store_, open_store(world_));
  recorder_.emplace(world_.disk(), *store_, timeline_);
  recorder_->opened();
  return {};
}

void Stage::close() {
  recorder_.reset();
  store_.reset();
}

Status Stage::commit_during_a_fold(const std::vector<std::vector<Recorder::Change>>& commits) {
  std::vector<Recorder::Together> list;
  for (const auto& changes : commits) list.push_back({changes, Durability::durable});
  Future<void> folded;
  STOKER_TRY(recorder_->commit_batch(list, [&] {
    auto held = world_.disk().hold();
    folded = store_->fold_all();
    return held;
  }));
  return folded.wait();
}

void Stage::take_away(size_t shard) {
  away_[shard] = world_.disk().image(world_.paths()[shard]);
  world_.disk().remove(world_.paths()[shard]);
  troubled(coded::shard_bit(shard));
}

void Stage::bring_back(size_t shard) { world_.disk().put(world_.paths()[shard], away_.at(shard)); }

void Stage::troubled(coded::ShardSet shards) {
  world_.disk().note(static_cast<uint64_t>(Note::troubled), shards);
}

const std::vector<NamedState>& named_states() {
  using Kind = NamedState::Kind;
  static const std::vector<NamedState> states = {
      {"two_overlapping_updates", overlapping},
      {"a_fold", fold},
      {"an_update_during_a_fold", update_during_a_fold},
      {"folds_of_two_chunks_at_one_offset", two_chunks_at_one_offset},
      {"a_multi_range_transaction", transaction},
      {"whole_objects", whole_objects},
      {"full_logs", full_logs},
      {"an_apply_torn_on_all_parities", fold, Kind::torn_apply},
      {"a_parity_of_other_versions", fold, Kind::lost_stage},
      {"a_repair", repair},
      {"a_rotten_header_page", fold, Kind::rotten_pages},
      {"a_shard_absent_then_back", absent_then_back},
      {"a_crash_inside_recovery_of_a_fold", fold, Kind::in_recovery},
      {"a_crash_inside_recovery_of_a_transaction", transaction, Kind::in_recovery},
      {"a_crash_inside_recovery_of_a_repair", repair, Kind::in_recovery},
      {"a_record_gone_from_all_logs", updates, Kind::gone_records},
  };
  return states;
}

}  // namespace stoker
