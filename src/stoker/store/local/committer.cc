#include "stoker/store/local/committer.h"
#include "stoker/base/bytes.h"

#include <span>
#include <string_view>
#include <utility>

#include "stoker/base/check.h"

namespace stoker::local {
void Committer::push(std::unique_ptr<CommitEntry> entry) {
  STOKER_CHECK((entry->kind == CommitEntry::Kind::commit) == (entry->state != nullptr));
  STOKER_CHECK(entry->version == 0 && entry->items.empty());
  queue_.push_back(std::move(entry));
}

CommitGroup Committer::next_group() {
  STOKER_CHECK(claimed_);
  CommitGroup group;
  while (!queue_.empty()) {
    const CommitEntry& head = *queue_.front();
    if (head.kind == CommitEntry::Kind::commit && head.state->pending > 0) break;
    if (!group.empty()) {
      const CommitEntry& first = *group.front();
      if (head.kind != CommitEntry::Kind::commit || first.kind != CommitEntry::Kind::commit) break;
      if (first.durability == Durability::deferred && head.durability == Durability::durable) break;
      if (head.depends()) break;
    }
    group.push_back(std::move(queue_.front()));
    queue_.pop_front();
  }
  return group;
}

bool Committer::claim() { return !std::exchange(claimed_, true); }

void Committer::release() { STOKER_CHECK(std::exchange(claimed_, false)); }

void Committer::defer(const CommitEntry& entry) {
  STOKER_CHECK(claimed_ && entry.durability == Durability::deferred);
  // More than a record may hold: the next durable commit writes an image of the map, which has
  // them.
  if (deferred_items_ && deferred_items_->size() + entry.items.size() > payload_max())
    deferred_items_.reset();
  if (deferred_items_) *deferred_items_ += entry.items;
  if (entry.state) deferred_touched_ |= entry.state->touched;
}

Status Committer::make_durable(const std::string& items, uint64_t touched, const Map& map,
                               Mutex& mutex) {
  touched |= deferred_touched_;
  STOKER_CHECK(volumes_.size() == kVolumesMax || touched >> volumes_.size() == 0);
  IoBatch flush(loop_, Priority::demand);
  for (size_t volume = 0; volume < volumes_.size(); ++volume) {
    if ((touched >> volume & 1U) != 0) flush.sync(volumes_[volume].file.id);
  }
  if (const Status status = flush.run(); !status)
    return status.error().with("flushing the data of a commit");
  const auto deferred = std::exchange(deferred_items_, std::string());
  deferred_touched_ = 0;
  if (deferred && journal_.fits(deferred->size() + items.size())) return append(*deferred + items);
  // The image holds the deferred commits.
  if (items.size() <= journal_.payload_max()) {
    STOKER_TRY(write_image(map));
    return items.empty() ? Status() : append(items);
  }
  // Too much for a record, though the map that results is not: it holds these commits as well.
  std::optional<Map> after;
  {
    const MutexLock lock(mutex);
    after.emplace(map);
  }
  std::vector<Extent> freed;
  STOKER_TRY(after->apply(bytes_of(items), freed));
  return write_image(*after);
}

Status Committer::append(const std::string& record) {
  const Status status = journal_.append(record);
  return status ? status : status.error().with("writing the journal");
}

Status Committer::write_image(const Map& map) {
  const Status status = journal_.begin(map);
  return status ? status : status.error().with("writing a new image of the map");
}

}  // namespace stoker::local
