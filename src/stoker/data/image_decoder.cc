#include "stoker/data/image_decoder.h"

#include <atomic>
#include <cstring>
#include <optional>
#include <utility>

#include "stoker/base/clock.h"
#include "stoker/data/spares.h"

namespace stoker::data {
namespace {

constexpr const char* kWhere = "data/image_decoder";

}  // namespace

Images::~Images() {
  if (spares) spares->give_back(std::move(memory));
}

class ImageDecoder::State {
 public:
  State(const JpegOptions& options, size_t threads, size_t spares)
      : options_(options), spares_(std::make_shared<Spares>(spares)), pool_(threads) {}

  const JpegOptions& options() const { return options_; }

  // The batch is there. One task an image: the threads share out even a single batch.
  void start(const BatchPtr& batch, uint64_t first, uint64_t samples, Promise<ImagesPtr> promise) {
    const size_t count = batch->picks.size();
    auto work = std::make_shared<Work>(count, std::move(promise));
    work->images->begun = Clock::real().now_ns();
    work->images->batch = batch;
    work->images->memory = spares_->take(count * options_.bytes());
    work->images->spares = spares_;
    for (size_t i = 0; i < count; ++i) {
      const uint64_t position = first + i;
      const uint64_t epoch = samples == 0 ? position : position / samples;
      pool_.run([this, work, i, epoch] {
        decode_one(*work, i, epoch);
        if (--work->left == 0) finish(*work);
      });
    }
    if (count == 0) finish(*work);
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

  void finish(Work& work) const {
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
  }

  const JpegOptions options_;
  const std::shared_ptr<Spares> spares_;
  Pool pool_;  // the last member: it ends before what its tasks use
};

Result<std::unique_ptr<ImageDecoder>> ImageDecoder::make(const JpegOptions& options, size_t threads,
                                                         size_t spares) {
  STOKER_TRY(check(options));
  if (threads == 0)
    return make_error(Code::invalid_argument, "images need at least one thread to be decoded on",
                      kWhere);
  return std::unique_ptr<ImageDecoder>(
      new ImageDecoder(std::make_shared<State>(options, threads, spares)));
}

ImageDecoder::ImageDecoder(std::shared_ptr<State> state) : state_(std::move(state)) {}
ImageDecoder::~ImageDecoder() = default;

const JpegOptions& ImageDecoder::options() const { return state_->options(); }

Future<ImagesPtr> ImageDecoder::decode(const Future<BatchPtr>& batch, uint64_t first,
                                       uint64_t samples) {
  Promise<ImagesPtr> promise;
  Future<ImagesPtr> future = promise.future();
  batch.on_done([state = state_, first, samples,
                 promise = std::move(promise)](const Result<BatchPtr>& read) mutable {
    if (!read) return promise.complete(read.error());
    state->start(*read, first, samples, std::move(promise));
  });
  return future;
}

}  // namespace stoker::data
