#include "stoker/store/one_object.h"

#include <utility>

#include "stoker/base/bytes.h"

namespace stoker {

Status OneObject::check_open(std::string_view wanted) const {
  if (done)
    return make_error(Code::invalid_argument, "the transaction is already committed: begin another",
                      store.where);
  if (key.empty() || key == wanted) return {};
  return make_error(Code::unsupported,
                    std::string("a transaction of ") + store.name +
                        " holds one object, and this one has '" + key + "' already: commit '" +
                        std::string(wanted) +
                        "' in another, or use a store with transactions, such as local:",
                    store.where);
}

Status OneObject::check_chunk(uint32_t chunk_bytes) const {
  const bool good =
      chunk_bytes % kIoAlign == 0 && chunk_bytes >= 64 * kKiB && chunk_bytes <= 8 * kMiB;
  if (chunk_bytes == 0 || good) return {};
  return make_error(Code::invalid_argument,
                    "a chunk is a multiple of 4 KiB from 64 KiB to 8 MiB, not " +
                        std::to_string(chunk_bytes) + " bytes",
                    store.where);
}

Status OneObject::check_write(std::string_view wanted, uint64_t offset, uint64_t size,
                              const std::function<Status()>& there) const {
  const std::string name(wanted);
  if (!touched || removed) {
    STOKER_TRY(there());
    return make_error(Code::unsupported,
                      std::string(store.name) + " writes objects anew: call resize('" + name +
                          "') in this transaction first, and write all of it",
                      store.where);
  }
  if (offset <= bytes && size <= bytes - offset) return {};
  return make_error(Code::invalid_argument,
                    "bytes " + std::to_string(offset) + " to " + std::to_string(offset + size) +
                        " are beyond the end of '" + name + "', which has " +
                        std::to_string(bytes) + "; resize it first",
                    store.where);
}

Status OneObject::check_read(std::string_view wanted) const {
  if (!touched || key != wanted) return {};
  return make_error(Code::unsupported,
                    std::string("what is staged in ") + store.name +
                        " cannot be read before it is committed: '" + std::string(wanted) + "'",
                    store.where);
}

void OneObject::fail(const Error& error) {
  if (!failed && !done) failed = error;
}

Status OneObject::finish() {
  STOKER_TRY(check_open(key));
  done = true;
  return {};
}

void OneObject::settle(Pool& pool, std::function<void()> then) {
  if (pending > 0)
    settled_ = std::move(then);  // the last of what is under way calls it
  else
    pool.run(std::move(then));
}

std::function<void()> OneObject::ended(const Status& status) {
  if (!status && !failed) failed = status.error();
  return --pending == 0 ? std::exchange(settled_, {}) : std::function<void()>();
}

}  // namespace stoker
