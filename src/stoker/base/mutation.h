// Deliberate bugs, one at a time, by which tests show that they find what they are for. A part that
// has some lists them in an enum `Mutation`, with `none` in front, and asks mutated(Mutation::x)
// where x would strike. Only the build of its sources that its mutation test links (tests/crash)
// has them, and sets mutation<Mutation>: in any other mutated() is a constant false, and the
// compiler leaves nothing of what it guards.
#pragma once

namespace stoker {

#ifdef STOKER_MUTATIONS
template <typename Mutation>
inline Mutation mutation = Mutation::none;
template <typename Mutation>
bool mutated(Mutation which) {
  return mutation<Mutation> == which;
}
#else
template <typename Mutation>
constexpr bool mutated(Mutation) {
  return false;
}
#endif

}  // namespace stoker
