// Recovery: from what lies on the shards to a store that serves: steps 2 to 10 of *Open* in
// docs/formats/coded_store.md. What it finds it leaves with the owners that it is given.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "stoker/store/coded/fold/folder.h"
#include "stoker/store/coded/format/headers.h"
#include "stoker/store/coded/recovery/found.h"

namespace stoker::coded {

// Used once, before the store has threads.
class Recovery {
 public:
  Recovery(const FoldParts& parts, Folder& folder)
      : map_(parts.map),
        shards_(parts.shards),
        shape_(parts.shards.shape()),
        reader_(parts.reader),
        logs_(parts.logs),
        rebuilder_(parts.rebuilder),
        joining_(parts.joining),
        folder_(folder) {}
  Status run(bool read_only);

 private:
  // What was found is looked at, and what counts of it chosen.
  Status load_table();
  Status load_raw();
  void choose_folds();
  void choose_vals();
  void find_gone();
  void let_go();
  // Everything that is written.
  Status settle();
  Status restore_reserve();
  Status make_readable();
  Status append(std::map<size_t, FrameBuilder>& frames, std::map<size_t, LogFrame>& written);
  Status append_commits();
  Status append_vals();
  Status append_folds();
  Status roll_forward();
  Status catch_up();
  Status roll_forward(const StripePtr& stripe);
  bool lags(const Stripe& stripe, const RawHeaders& raw, size_t position) const;
  StripePtr find_stripe(uint64_t id) const;

  CommittedMap& map_;
  Shards& shards_;
  const Shape& shape_;
  Reader& reader_;
  LogSet& logs_;
  Rebuilder& rebuilder_;
  Joining& joining_;
  Folder& folder_;
  Found found_;
  std::string hidden_;  // what is lost, where nobody knows what it changed
  std::map<uint64_t, std::weak_ptr<Stripe>> stripes_;
  std::map<uint64_t, std::string> object_of_;  // the key, by stripe
  std::map<uint64_t, RawHeaders> raw_;
  ShardSet full_ = 0;  // live shards whose logs have no room for what they lack
};

}  // namespace stoker::coded
