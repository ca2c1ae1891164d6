#include "stoker/data/jpeg.h"

#include <gtest/gtest.h>

// jpeglib.h needs size_t and FILE.
#include <cstdio>
#include <cstdlib>
#include <set>
#include <vector>

#include <jpeglib.h>

#include "stoker/data/resize.h"
#include "stoker/data/shrink.h"

namespace stoker::data {
namespace {

JpegOptions options(Crop crop, bool flip = false) {
  JpegOptions all;
  all.height = 10;
  all.width = 20;
  all.crop = crop;
  all.flip = flip;
  all.seed = 3;
  return all;
}

// A grey square of 64 pixels; with a script, progressive.
std::vector<std::byte> encoded(const std::vector<jpeg_scan_info>& scans = {}) {
  jpeg_compress_struct info{};
  jpeg_error_mgr errors{};
  info.err = jpeg_std_error(&errors);
  jpeg_create_compress(&info);
  unsigned char* file = nullptr;
  unsigned long bytes = 0;  // NOLINT(google-runtime-int): libjpeg's
  jpeg_mem_dest(&info, &file, &bytes);
  info.image_width = info.image_height = 64;
  info.input_components = 1;
  info.in_color_space = JCS_GRAYSCALE;
  jpeg_set_defaults(&info);
  if (!scans.empty()) {
    info.scan_info = scans.data();
    info.num_scans = static_cast<int>(scans.size());
  }
  jpeg_start_compress(&info, TRUE);
  std::vector<JSAMPLE> row(64, 99);
  JSAMPROW rows = row.data();
  while (info.next_scanline < info.image_height) (void)jpeg_write_scanlines(&info, &rows, 1);
  jpeg_finish_compress(&info);
  const auto* const first = reinterpret_cast<const std::byte*>(file);
  std::vector<std::byte> all(first, first + bytes);
  jpeg_destroy_compress(&info);
  std::free(file);  // NOLINT(cppcoreguidelines-no-malloc): libjpeg's
  return all;
}

// One scan for a bit of a coefficient.
std::vector<jpeg_scan_info> script(int coefficients, int bits) {
  std::vector<jpeg_scan_info> scans{{1, {0}, 0, 0, 0, 0}};
  for (int k = 1; k <= coefficients; ++k) {
    scans.push_back({1, {0}, k, k, 0, bits});
    for (int bit = bits; bit > 0; --bit) scans.push_back({1, {0}, k, k, bit, bit - 1});
  }
  return scans;
}

TEST(Jpeg, TheCropLiesInTheImageAndDependsOnItsKeyOnly) {
  std::set<std::pair<uint32_t, uint32_t>> corners;
  size_t mirrored = 0;
  const JpegOptions random = options(Crop::random, true);
  for (uint64_t sample = 0; sample < 400; ++sample) {
    const View2d view = choose(random, 300, 200, 1, sample);
    EXPECT_EQ(view.rect, choose(random, 300, 200, 1, sample).rect);
    EXPECT_LE(view.rect.x + view.rect.width, 300U);
    EXPECT_LE(view.rect.y + view.rect.height, 200U);
    EXPECT_GE(view.rect.width * view.rect.height, 0.07 * 300 * 200);
    corners.insert({view.rect.x, view.rect.y});
    mirrored += view.mirrored ? 1 : 0;
  }
  EXPECT_GT(corners.size(), 300U);
  EXPECT_GT(mirrored, 150U);
  EXPECT_LT(mirrored, 250U);
  EXPECT_NE(choose(random, 300, 200, 1, 7).rect, choose(random, 300, 200, 2, 7).rect);
}

TEST(Jpeg, TheCentreHasTheShapeOfTheResult) {
  EXPECT_EQ(choose(options(Crop::centre), 100, 100, 0, 0).rect, (Rect{0, 25, 100, 50}));
  EXPECT_EQ(choose(options(Crop::centre), 400, 100, 0, 0).rect, (Rect{100, 0, 200, 100}));
  EXPECT_EQ(choose(options(Crop::centre), 1, 1, 0, 0).rect, (Rect{0, 0, 1, 1}));
  EXPECT_EQ(choose(options(Crop::whole), 7, 9, 0, 0).rect, (Rect{0, 0, 7, 9}));
}

TEST(Jpeg, OptionsThatMakeNoSenseAreRefused) {
  EXPECT_TRUE(check(options(Crop::whole)));
  JpegOptions wrong = options(Crop::whole);
  wrong.width = 0;
  EXPECT_EQ(check(wrong).error().code, Code::invalid_argument);
  wrong = options(Crop::whole);
  wrong.normalise = Normalise{{0, 0, 0}, {1, 0, 1}};
  EXPECT_EQ(check(wrong).error().code, Code::invalid_argument);
}

TEST(Jpeg, WhatIsNoJpegIsDamage) {
  std::vector<std::byte> into(options(Crop::whole).bytes());
  for (const size_t size : {size_t{0}, size_t{3}, size_t{500}}) {
    const std::vector<std::byte> file(size, std::byte{0xff});
    EXPECT_EQ(decode_jpeg(file, options(Crop::whole), 0, 0, into.data()).error().code,
              Code::corruption);
  }
}

TEST(Jpeg, WhatBeginsOtherwiseIsDamageThoughAJpegFollows) {
  const JpegOptions whole = options(Crop::whole);
  std::vector<std::byte> file = encoded(), into(whole.bytes());
  ASSERT_TRUE(is_jpeg(file));
  EXPECT_TRUE(decode_jpeg(file, whole, 0, 0, into.data()));
  file.insert(file.begin() + 2, std::byte{0});  // libjpeg goes on behind it
  ASSERT_FALSE(is_jpeg(file));
  EXPECT_EQ(decode_jpeg(file, whole, 0, 0, into.data()).error().code, Code::corruption);
}

TEST(Jpeg, AFileOfCountlessScansIsRefused) {
  const JpegOptions whole = options(Crop::whole);
  std::vector<std::byte> into(whole.bytes());
  EXPECT_TRUE(decode_jpeg(encoded(script(63, 0)), whole, 0, 0, into.data()));  // 64 scans
  EXPECT_EQ(into.front(), std::byte{99});
  const Status done = decode_jpeg(encoded(script(63, 1)), whole, 0, 0, into.data());  // 127
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code, Code::corruption);
  EXPECT_NE(done.error().what.find("more than 100 scans"), std::string::npos) << done.error().what;
}

TEST(Shrink, TheShorterSideIsWhatWasAskedForAndTheBytesAreTheSame) {
  const std::vector<std::byte> file = encoded();
  const auto made = shrink_jpeg(file, 16, 90);
  ASSERT_TRUE(made && *made);
  const auto size = jpeg_size(**made);
  ASSERT_TRUE(size);
  EXPECT_EQ(size->width, 16U);
  EXPECT_EQ(size->height, 16U);
  EXPECT_EQ(**made, **shrink_jpeg(file, 16, 90));
  const JpegOptions whole = options(Crop::whole);
  std::vector<std::byte> into(whole.bytes());
  ASSERT_TRUE(decode_jpeg(**made, whole, 0, 0, into.data()));
  EXPECT_EQ(into.front(), std::byte{99});
}

TEST(Shrink, WhatIsSmallStaysAndDamageIsTold) {
  std::vector<std::byte> file = encoded();
  const auto kept = shrink_jpeg(file, 64, 90);
  ASSERT_TRUE(kept);
  EXPECT_FALSE(*kept);
  EXPECT_EQ(shrink_jpeg(file, 0, 90).error().code, Code::invalid_argument);
  EXPECT_EQ(shrink_jpeg(file, 16, 101).error().code, Code::invalid_argument);
  file.resize(file.size() / 2);
  EXPECT_EQ(shrink_jpeg(file, 16, 90).error().code, Code::corruption);
}

TEST(Resize, WeightsSumUpToOneInsideTheLine) {
  for (const auto& [begin, length, pixels, to] : {std::tuple{0.0, 10.0, 10U, 4U},
                                                  {0.5, 7.25, 9U, 3U},
                                                  {0.0, 1.0, 1U, 5U},
                                                  {3.0, 2.0, 5U, 8U},
                                                  {2.0, 500.0, 600U, 3U}}) {
    const Taps taps(begin, length, pixels, to);
    for (uint32_t x = 0; x < to; ++x) {
      float sum = 0;
      for (uint32_t k = 0; k < taps.width; ++k) {
        const float weight = taps.weights[x * taps.width + k];
        sum += weight;
        EXPECT_GE(weight, 0);
        if (weight > 0) {
          EXPECT_GE(taps.first[x] + k + 1.0, begin);
          EXPECT_LE(taps.first[x] + k, begin + length);
        }
      }
      EXPECT_NEAR(sum, 1, 1e-5);
      EXPECT_LE(taps.first[x] + taps.width, pixels);
    }
  }
}

TEST(Resize, ARowOfOneColourKeepsIt) {
  const Taps taps(0, 33, 33, 7);
  std::vector<float> row(3 * 33 + 4);
  std::vector<uint8_t> pixels(3 * 33);
  for (size_t i = 0; i < pixels.size(); ++i) pixels[i] = static_cast<uint8_t>(10 * (i % 3 + 1));
  add_row(pixels.data(), 0.25F, pixels.size(), row.data());
  add_row(pixels.data(), 0.75F, pixels.size(), row.data());
  std::vector<uint8_t> bytes(3 * 7);
  finish_row(row.data(), taps, false, bytes.data());
  std::vector<float> floats(3 * 7);
  finish_row(row.data(), taps, {{2, 2, 2, 0}, {1, 1, 1, 0}}, true, floats.data());
  for (size_t i = 0; i < bytes.size(); ++i) {
    EXPECT_EQ(bytes[i], 10 * (i % 3 + 1));
    EXPECT_NEAR(floats[i], 20.0F * static_cast<float>(i % 3 + 1) + 1, 1e-3);
  }
}

}  // namespace
}  // namespace stoker::data
