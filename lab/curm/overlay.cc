#include "curm/overlay.h"

#include <algorithm>
#include <set>
#include <utility>

namespace stoker::curm {

std::vector<uint64_t> Overlay::put(uint64_t seq, Logged logged) {
  RangeMap<uint64_t>& owners = owners_[logged.position];
  std::set<uint64_t> covered;
  for (const auto& piece : owners.within(logged.offset, logged.bytes)) covered.insert(piece.value);
  owners.put(logged.offset, logged.bytes, seq);
  logged_[seq] = std::move(logged);
  std::vector<uint64_t> overtaken;
  for (const uint64_t each : covered) {
    const Logged& old = logged_.at(each);
    const auto left = owners.within(old.offset, old.bytes);
    if (std::none_of(left.begin(), left.end(),
                     [each](const auto& piece) { return piece.value == each; }))
      overtaken.push_back(each);
  }
  return overtaken;
}

void Overlay::add_place(uint64_t seq, const LogPlace& place, bool in_front) {
  const auto found = logged_.find(seq);
  if (found == logged_.end()) return;
  auto& places = found->second.places;
  places.insert(in_front ? places.begin() : places.end(), place);
}

void Overlay::lose_places(NodeId node) {
  for (auto& [seq, logged] : logged_)
    std::erase_if(logged.places, [node](const LogPlace& place) { return place.node == node; });
}

Overlay::Logged Overlay::forget(uint64_t seq) {
  auto found = logged_.extract(seq);
  return std::move(found.mapped());
}

std::vector<LogPlace> Overlay::places() const {
  std::vector<LogPlace> all;
  for (const auto& [seq, logged] : logged_)
    all.insert(all.end(), logged.places.begin(), logged.places.end());
  return all;
}

std::vector<Overlay::Piece> Overlay::newest(int position, uint64_t at, uint64_t bytes) const {
  std::vector<Piece> pieces;
  const auto owners = owners_.find(position);
  if (owners == owners_.end()) return pieces;
  for (const auto& piece : owners->second.within(at, bytes))
    pieces.push_back({piece.value, piece.at, piece.size()});
  return pieces;
}

std::vector<Overlay::Piece> Overlay::live(int position) const {
  std::set<uint64_t> seqs;
  for (const Piece& piece : newest(position, 0, UINT64_MAX)) seqs.insert(piece.seq);
  std::vector<Piece> records;
  records.reserve(seqs.size());
  for (const uint64_t seq : seqs)
    records.push_back({seq, logged_.at(seq).offset, logged_.at(seq).bytes});
  return records;
}

void Overlay::ask(Round& round, const Chunk& chunk, std::vector<Piece>& pieces) const {
  const auto errand_to = [&round](NodeId id) {
    return std::find_if(round.errands.begin(), round.errands.end(),
                        [id](const Errand& errand) { return errand.node == id; });
  };
  struct Request {
    std::vector<Step::Part> parts;
    std::vector<Piece*> pieces;
    uint64_t bytes = 0;
  };
  std::map<NodeId, Request> requests;
  for (Piece& piece : pieces) {
    const Logged& logged = logged_.at(piece.seq);
    const uint64_t inside = piece.at - logged.offset;
    if (logged.kept.size() != 0) {
      piece.from = std::make_shared<Value>(logged.kept);
      piece.begin = inside;
      continue;
    }
    auto place = std::find_if(
        logged.places.begin(), logged.places.end(),
        [&](const LogPlace& each) { return errand_to(each.node) != round.errands.end(); });
    if (place == logged.places.end()) place = logged.places.begin();
    Request& request = requests[place->node];
    request.parts.push_back({true, inside, piece.bytes, *place});
    request.pieces.push_back(&piece);
    piece.begin = std::exchange(request.bytes, request.bytes + piece.bytes);
  }
  for (auto& [id, request] : requests) {
    const auto found = errand_to(id);
    Errand& errand = found != round.errands.end() ? *found : round.to(id);
    errand.answered += request.bytes;
    const Slot read = errand.gather(chunk, std::move(request.parts));
    for (Piece* piece : request.pieces) piece->from = read;
  }
}

}  // namespace stoker::curm
