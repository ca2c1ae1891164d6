// ImageDecoder: the JPEGs of a batch become one piece of memory of pixels, on the threads of the
// pipeline.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "stoker/base/future.h"
#include "stoker/data/batch_reader.h"
#include "stoker/data/jpeg.h"
#include "stoker/data/pipeline_threads.h"

namespace stoker::data {

// A sample whose image cannot be had.
struct DamagedImage {
  uint64_t at = 0;  // in the batch
  std::string why;
};

// What was decoded. Any thread; it may outlive its decoder.
struct Images {
  ~Images();  // gives the memory back

  BatchPtr batch;
  Slot memory;
  uint64_t bytes = 0;                 // of it that the images take, one behind the other
  std::vector<uint64_t> kept;         // which samples of the batch they are, rising
  std::vector<uint64_t> parts;        // which part of each of these is the JPEG
  std::vector<DamagedImage> damaged;  // the others, rising
  uint64_t begun = 0, decoded = 0;    // ns of Clock::real()
  std::shared_ptr<Spares> spares;
};
using ImagesPtr = std::shared_ptr<const Images>;

// Any thread.
class ImageDecoder {
 public:
  // invalid_argument: options that make no sense. spares: pieces of memory kept for the next
  // batches. arena: where they lie as far as there is room, as long as any of them is there; or
  // null.
  static Result<std::unique_ptr<ImageDecoder>> make(const JpegOptions& options,
                                                    std::shared_ptr<PipelineThreads> threads,
                                                    size_t spares,
                                                    std::shared_ptr<Arena> arena = {});
  // Waits for the batches that it was given, and decodes them. Not on a thread of the pipeline.
  ~ImageDecoder();
  ImageDecoder(const ImageDecoder&) = delete;
  ImageDecoder& operator=(const ImageDecoder&) = delete;

  // The image of each sample: the first of its parts that begins as a JPEG does. Sample i of the
  // batch stands at position `first` + i; `samples` of them are an epoch (0: there are no epochs,
  // and each position counts as one of its own). The batch's own error is the only one.
  Future<ImagesPtr> decode(const Future<BatchPtr>& batch, uint64_t first, uint64_t samples);

  const JpegOptions& options() const;

 private:
  class State;
  ImageDecoder(std::shared_ptr<PipelineThreads> threads, std::shared_ptr<State> state);
  const std::shared_ptr<PipelineThreads> threads_;
  const std::shared_ptr<State> state_;
};

}  // namespace stoker::data
