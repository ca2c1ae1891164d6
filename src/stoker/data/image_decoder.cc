#include "stoker/data/image_decoder.h"

#include <atomic>
#include <cstring>
#include <optional>
#include <utility>

#include "stoker/base/clock.h"
#include "stoker/data/spares.h"

namespace stoker::data {
Images::~Images() {
  if (spares) spares->give_back(std::move(memory));
}

// The last to know of it may be a batch, on a thread of the pipeline: so it does not own the
// threads.
class ImageDecoder::State {
 public:
  State(const JpegOptions& options, PipelineThreads& threads, size_t spares,
        std::shared_ptr<Arena> arena)
      : options_(options),
        spares_(std::make_shared<Spares>(spares, std::move(arena))),
        threads_(threads) {}

  const JpegOptions& options() const { return options_; }

  void begin() {
    MutexLock lock(mutex_);
    ++under_way_;
  }

  void end() {
    MutexLock lock(mutex_);
    if (--under_way_ == 0) idle_.notify_all();
  }

  void wait() {
    MutexLock lock(mutex_);
    idle_.wait(lock, [this]() REQUIRES(mutex_) { return under_way_ == 0; });
  }

  // The batch is there. One task an image: the threads share out even a single batch.
  static void start(const std::shared_ptr<State>& state, const BatchPtr& batch, uint64_t first,
                    uint64_t samples, Promise<ImagesPtr> promise) {
    const size_t count = batch->picks.size();
    State& self = *state;
    auto work = std::make_shared<Work>(count, std::move(promise));
    work->images->begun = Clock::real().now_ns();
    work->images->batch = batch;
    work->images->memory = self.spares_->take(count * self.options_.bytes());
    work->images->spares = self.spares_;
    for (size_t i = 0; i < count; ++i) {
      const uint64_t position = first + i;
      const uint64_t epoch = samples == 0 ? position : position / samples;
      self.threads_.run([state, work, i, epoch] {
        state->decode_one(*work, i, epoch);
        if (--work->left == 0) state->finish(*work);
      });
    }
    if (count == 0) self.finish(*work);
  }

 private:
  struct Work {
    Work(size_t count, Promise<ImagesPtr> to)
        : parts(count), why(count), left(count), promise(std::move(to)) {}
    std::shared_ptr<Images> images = std::make_shared<Images>();
    std::vector<uint64_t> parts;                  // each thread writes its own
    std::vector<std::optional<std::string>> why;  // likewise
    std::atomic<size_t> left;
    Promise<ImagesPtr> promise;
  };

  void decode_one(Work& work, size_t i, uint64_t epoch) const {
    const Batch& batch = *work.images->batch;
    for (uint64_t part = batch.starts[i]; part < batch.starts[i + 1]; ++part) {
      const Place& place = batch.parts[part];
      const std::span<const std::byte> file(batch.memory.data() + place.offset, place.bytes);
      if (!is_jpeg(file)) continue;
      work.parts[i] = part - batch.starts[i];
      // samples of different sources are different ones
      const Pick& pick = batch.picks[i];
      const uint64_t sample = pick.sample ^ (uint64_t{pick.source} << 48);
      const Status decoded = decode_jpeg(file, options_, epoch, sample,
                                         work.images->memory.data() + i * options_.bytes());
      if (!decoded) work.why[i] = decoded.error().what;
      return;
    }
    work.why[i] = "none of its parts begins as a JPEG does";
  }

  void finish(Work& work) {
    Images& images = *work.images;
    const uint64_t each = options_.bytes();
    for (size_t i = 0; i < work.why.size(); ++i) {
      if (work.why[i]) {
        images.damaged.push_back({i, *work.why[i]});
        continue;
      }
      if (images.kept.size() != i)  // behind one that is left out
        std::memmove(images.memory.data() + images.kept.size() * each,
                     images.memory.data() + i * each, each);
      images.kept.push_back(i);
      images.parts.push_back(work.parts[i]);
    }
    images.bytes = images.kept.size() * each;
    images.decoded = Clock::real().now_ns();
    work.promise.complete(ImagesPtr(std::move(work.images)));
    end();
  }

  const JpegOptions options_;
  const std::shared_ptr<Spares> spares_;
  PipelineThreads& threads_;  // there while anything is under way
  Mutex mutex_;
  CondVar idle_;
  size_t under_way_ GUARDED_BY(mutex_) = 0;  // batches
};

Result<std::unique_ptr<ImageDecoder>> ImageDecoder::make(const JpegOptions& options,
                                                         std::shared_ptr<PipelineThreads> threads,
                                                         size_t spares,
                                                         std::shared_ptr<Arena> arena) {
  STOKER_TRY(check(options));
  auto state = std::make_shared<State>(options, *threads, spares, std::move(arena));
  return std::unique_ptr<ImageDecoder>(new ImageDecoder(std::move(threads), std::move(state)));
}

ImageDecoder::ImageDecoder(std::shared_ptr<PipelineThreads> threads, std::shared_ptr<State> state)
    : threads_(std::move(threads)), state_(std::move(state)) {}
ImageDecoder::~ImageDecoder() { state_->wait(); }

const JpegOptions& ImageDecoder::options() const { return state_->options(); }

Future<ImagesPtr> ImageDecoder::decode(const Future<BatchPtr>& batch, uint64_t first,
                                       uint64_t samples) {
  Promise<ImagesPtr> promise;
  Future<ImagesPtr> future = promise.future();
  state_->begin();
  batch.on_done([state = state_, first, samples,
                 promise = std::move(promise)](const Result<BatchPtr>& read) mutable {
    if (read) return State::start(state, *read, first, samples, std::move(promise));
    promise.complete(read.error());
    state->end();
  });
  return future;
}

}  // namespace stoker::data
