#include "curm/substrate.h"

namespace stoker::curm {

Step& Errand::add(Step::Kind kind) {
  Step& step = steps.emplace_back();
  step.kind = kind;
  return step;
}

Slot Errand::gather(const Chunk& chunk, std::vector<Step::Part> parts) {
  Step& step = add(Step::Kind::read);
  step.chunk = chunk;
  step.parts = std::move(parts);
  step.value = std::make_shared<Value>();
  return step.value;
}

void Errand::write(const Chunk& chunk, uint64_t offset, Slot value) {
  Step& step = add(Step::Kind::write);
  step.chunk = chunk;
  step.offset = offset;
  step.value = std::move(value);
}

Slot Errand::derive(std::function<Value()> compute) {
  Step& step = add(Step::Kind::derive);
  step.compute = std::move(compute);
  step.value = std::make_shared<Value>();
  return step.value;
}

PlaceSlot Errand::append(Record record) {
  return append_when_ready([record = std::move(record)] { return record; });
}

PlaceSlot Errand::append_when_ready(std::function<Record()> record) {
  Step& step = add(Step::Kind::append);
  step.record = std::move(record);
  step.place = std::make_shared<LogPlace>();
  return step.place;
}

PlaceSlot Errand::append_behind(const Chunk& chunk, Record record) {
  PlaceSlot place = append(std::move(record));
  steps.back().chunk = chunk;
  steps.back().reserved = true;
  return place;
}

void Errand::mark(const Chunk& chunk, uint64_t seq, std::optional<uint8_t> said) {
  Step& step = add(Step::Kind::mark);
  step.chunk = chunk;
  step.seq = seq;
  step.said = said;
}

void Errand::release(std::vector<LogPlace> places, uint64_t settled) {
  Step& step = add(Step::Kind::release);
  step.released = std::move(places);
  step.seq = settled;
}

}  // namespace stoker::curm
