#include "stoker/offload/step_transaction.h"

#include "stoker/base/check.h"

namespace stoker::offload {

void JobCount::begin() {
  MutexLock lock(mutex_);
  ++computing_;
  ++holding_;
}

void JobCount::hold() {
  MutexLock lock(mutex_);
  ++holding_;
}

void JobCount::computed() {
  MutexLock lock(mutex_);
  STOKER_CHECK(computing_ > 0 && computing_ <= holding_);
  --computing_;
}

void JobCount::end() {
  MutexLock lock(mutex_);
  STOKER_CHECK(holding_ > computing_);
  if (--holding_ == 0) none_.notify_all();
}

size_t JobCount::computing() const {
  MutexLock lock(mutex_);
  return computing_;
}

void JobCount::wait_none() const {
  MutexLock lock(mutex_);
  none_.wait(lock, [this]() REQUIRES(mutex_) { return holding_ == 0; });
}

Future<Version> StepTransaction::commit(Durability durability) {
  {
    MutexLock lock(mutex_);
    if (committed_)
      return fail(Code::invalid_argument, "this transaction is already committed: begin another");
    if (const size_t jobs = jobs_->computing(); jobs != 0) {
      return fail(Code::busy, "{} updates of this transaction still compute; wait for them first",
                  jobs);
    }
    if (poison_) return poison_->with("the step cannot be committed");
    if (abandoned_) return fail(Code::cancelled, "this transaction was abandoned: begin another");
    committed_ = true;
  }
  // The fate is set before the returned future is done: whoever waited for it sees the version.
  return transaction_->commit(durability).then([fate = fate_](const Result<Version>& version) {
    if (version) fate->version = *version;
    return version;
  });
}

void StepTransaction::poison(const Error& error) {
  MutexLock lock(mutex_);
  if (!poison_) poison_ = error;
}

std::optional<Error> StepTransaction::poisoned() const {
  MutexLock lock(mutex_);
  return poison_;
}

Status StepTransaction::begin_job() {
  MutexLock lock(mutex_);
  if (committed_)
    return fail(Code::invalid_argument, "this transaction was committed: updates need a new one");
  if (abandoned_)
    return fail(Code::cancelled, "this transaction was abandoned: updates need a new one");
  jobs_->begin();
  return {};
}

}  // namespace stoker::offload
