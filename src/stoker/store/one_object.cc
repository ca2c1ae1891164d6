#include "stoker/store/one_object.h"

#include <utility>

#include "stoker/base/check.h"

namespace stoker {

Status OneObject::check_open(std::string_view wanted) const {
  if (done)
    return fail(Code::invalid_argument, "the transaction is already committed: begin another");
  if (key.empty() || key == wanted) return {};
  return fail(Code::unsupported,
              "a transaction of {} changes one object, and this one changes '{}' already. Commit "
              "'{}' in another, or use a store with transactions, such as local:",
              store.name, key, wanted);
}

Status OneObject::check_write(std::string_view wanted, uint64_t offset, uint64_t size,
                              const std::function<Status()>& there) const {
  const std::string name(wanted);
  if (!touched || removed) {
    STOKER_TRY(there());
    return fail(Code::unsupported,
                "{} writes whole objects only: call resize('{}') in this transaction first, then "
                "write all of it",
                store.name, name);
  }
  if (offset <= bytes && size <= bytes - offset) return {};
  return fail(Code::invalid_argument,
              "bytes {} to {} are beyond the end of '{}', which has {}; resize it first", offset,
              offset + size, name, bytes);
}

Status OneObject::check_read(std::string_view wanted) const {
  if (!touched || key != wanted) return {};
  return fail(Code::unsupported, "{} cannot read staged data before its commit: commit '{}' first",
              store.name, wanted);
}

void OneObject::refuse(const Error& error) {
  if (!failed && !done) failed = error;
}

Status OneObject::finish() {
  STOKER_TRY(check_open(key));
  done = true;
  return {};
}

void OneObject::settle(Pool& pool, std::function<void()> then) {
  STOKER_CHECK(done && !settled_);
  if (pending > 0)
    settled_ = std::move(then);  // the last of what is under way calls it
  else
    pool.run(std::move(then));
}

std::function<void()> OneObject::ended(const Status& status) {
  STOKER_CHECK(pending > 0);
  if (!status && !failed) failed = status.error();
  return --pending == 0 ? std::exchange(settled_, {}) : std::function<void()>();
}

}  // namespace stoker
