#include <memory>

#include "curm/curm.h"
#include "curm/fl.h"
#include "curm/fo.h"
#include "curm/parix.h"
#include "curm/pl.h"

namespace stoker::curm {

std::unique_ptr<Scheme> make_scheme(std::string_view name, const Setup& setup) {
  if (name == "fo") return std::make_unique<FullOverwrite>(setup);
  if (name == "fl") return std::make_unique<FullLogging>(setup);
  if (name == "pl") return std::make_unique<ParityLogging>(setup);
  if (name == "plr") return std::make_unique<ReservedParityLogging>(setup);
  if (name == "parix") return std::make_unique<Parix>(setup);
  if (name == "vdl") return std::make_unique<Vdl>(setup);
  if (name == "curm") return std::make_unique<Curm>(setup);
  if (name == "curm-reserve") return std::make_unique<ReservedCurm>(setup);
  return nullptr;
}

}  // namespace stoker::curm
