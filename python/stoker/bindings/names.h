// Names of Python's that several bindings take.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <string_view>

#include "stoker/optim/moments.h"

inline stoker::optim::MomentType moment_type_of(std::string_view name) {
  using stoker::optim::MomentType;
  if (name == "exact") return MomentType::f32;
  if (name == "bf16") return MomentType::bf16;
  if (name == "8bit") return MomentType::q8;
  throw nanobind::value_error(
      ("moments '" + std::string(name) + "' is not one of exact, bf16, 8bit").c_str());
}
