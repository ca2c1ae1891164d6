// stoker._core: one bind_NAME function a file; the order matters where a later class names an
// earlier one.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_base(nb::module_& module);
void bind_optim(nb::module_& module);
void bind_memory(nb::module_& module);
void bind_order(nb::module_& module);
void bind_store(nb::module_& module);
void bind_data(nb::module_& module);
void bind_offload(nb::module_& module);

NB_MODULE(_core, module) {
  module.doc() = "The C++ core of Stoker. Use `import stoker`; these names may change.";
  // A model that lives until the interpreter ends keeps its store: that is no leak.
  nb::set_leak_warnings(false);
  module.attr("__version__") = STOKER_VERSION;
  bind_base(module);
  bind_optim(module);
  bind_memory(module);
  bind_order(module);
  bind_store(module);
  bind_data(module);
  bind_offload(module);
}
