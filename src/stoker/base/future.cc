#include "stoker/base/future.h"

#include <atomic>

namespace stoker {

Future<void> all(const std::vector<Future<void>>& futures) {
  if (futures.empty()) return Status();
  struct Join {
    std::vector<Future<void>> parts;
    std::atomic<size_t> left;
    Promise<void> promise;
  };
  auto join = std::make_shared<Join>();
  join->parts = futures;
  join->left = futures.size();
  Future<void> done = join->promise.future();
  for (const auto& part : futures) {
    part.on_done([join](const Status&) {
      if (join->left.fetch_sub(1) != 1) return;
      Status result;
      for (const auto& each : join->parts) {
        if (!each.wait()) {
          result = each.wait().error();
          break;
        }
      }
      join->parts.clear();
      join->promise.complete(std::move(result));
    });
  }
  return done;
}

}  // namespace stoker
