// Names of Python's that several bindings take.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <string_view>

#include "stoker/optim/moments.h"
#include "stoker/optim/optim.h"

inline nanobind::builtin_exception unknown_name(std::string_view what, std::string_view name,
                                                std::string_view choices) {
  return nanobind::value_error(
      (std::string(what) + " '" + std::string(name) + "' is not one of " + std::string(choices))
          .c_str());
}

inline stoker::optim::MomentType moment_type_of(std::string_view name) {
  using stoker::optim::MomentType;
  if (name == "exact") return MomentType::f32;
  if (name == "bf16") return MomentType::bf16;
  if (name == "8bit") return MomentType::q8;
  throw unknown_name("moments", name, "exact, bf16, 8bit");
}

inline stoker::optim::Algorithm algorithm_of(std::string_view name) {
  using stoker::optim::Algorithm;
  if (name == "adamw") return Algorithm::adamw;
  if (name == "adam") return Algorithm::adam;
  if (name == "sgd") return Algorithm::sgd;
  if (name == "lion") return Algorithm::lion;
  throw unknown_name("algorithm", name, "adamw, adam, sgd, lion");
}

inline bool is_bf16(std::string_view name) {
  if (name == "bf16") return true;
  if (name == "f32") return false;
  throw unknown_name("type", name, "bf16, f32");
}

inline stoker::optim::GradType grad_type_of(std::string_view name) {
  return is_bf16(name) ? stoker::optim::GradType::bf16 : stoker::optim::GradType::f32;
}
