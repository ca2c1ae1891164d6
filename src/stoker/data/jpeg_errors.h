// What libjpeg calls where it cannot go on. Its errors come by longjmp(), out of functions of C:
// nothing with a destructor may be made between setjmp() and there.
#pragma once

// jpeglib.h needs size_t and FILE.
#include <csetjmp>
#include <cstddef>
#include <cstdio>

#include <jpeglib.h>

#include <jerror.h>

namespace stoker::data {

struct JpegErrors {
  jpeg_error_mgr base;  // the first member: libjpeg hands out its address
  std::jmp_buf out;
  char why[JMSG_LENGTH_MAX] = "";
};

// As jpeg_error_mgr::error_exit of a JpegErrors: writes why, and jumps.
inline void leave_jpeg(j_common_ptr info) {
  auto* const errors = reinterpret_cast<JpegErrors*>(info->err);
  info->err->format_message(info, errors->why);
  std::longjmp(errors->out, 1);  // NOLINT(cert-err52-cpp)
}

}  // namespace stoker::data
