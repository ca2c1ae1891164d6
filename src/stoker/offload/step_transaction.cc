#include "stoker/offload/step_transaction.h"

namespace stoker::offload {

Future<Version> StepTransaction::commit(Durability durability) {
  {
    std::lock_guard lock(mutex_);
    if (committed_) return make_error(Code::invalid_argument, "this transaction was committed already", "offload/step");
    if (jobs_ != 0) {
      return make_error(Code::busy, std::to_string(jobs_) + " updates still write into this transaction; wait for them first", "offload/step");
    }
    if (poison_) return poison_->with("the step cannot be committed");
    if (abandoned_) return make_error(Code::cancelled, "this transaction was abandoned", "offload/step");
    committed_ = true;
  }
  // The fate is set before the returned future is done: whoever waited for it sees the version.
  return transaction_->commit(durability).then([fate = fate_](const Result<Version>& version) {
    if (version) fate->version = *version;
    return version;
  });
}

void StepTransaction::poison(const Error& error) {
  std::lock_guard lock(mutex_);
  if (!poison_) poison_ = error;
}

std::optional<Error> StepTransaction::poisoned() const {
  std::lock_guard lock(mutex_);
  return poison_;
}

Status StepTransaction::begin_job() {
  std::lock_guard lock(mutex_);
  if (committed_) return make_error(Code::invalid_argument, "this transaction was committed: updates need a new one", "offload/step");
  if (abandoned_) return make_error(Code::cancelled, "this transaction was abandoned: updates need a new one", "offload/step");
  ++jobs_;
  return {};
}

void StepTransaction::end_job() {
  std::lock_guard lock(mutex_);
  if (--jobs_ == 0) idle_.notify_all();
}

size_t StepTransaction::active_jobs() const {
  std::lock_guard lock(mutex_);
  return jobs_;
}

void StepTransaction::wait_idle() const {
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [this] { return jobs_ == 0; });
}

}  // namespace stoker::offload
