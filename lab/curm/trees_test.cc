// The decision trees that ship (src/stoker/classes), on traces that they did not learn from.
#include <gtest/gtest.h>

#include <array>

#include "curm/generator.h"
#include "stoker/classes/classes.h"

namespace stoker {
namespace {

TEST(ClassTree, TheOneThatShipsKnowsTheClasses) {
  EXPECT_EQ(ClassTree::shipped().classify(ClassFeatures{}), Class::read_only);  // never written
  std::array<int, 3> said{};
  ClassTable table(ClassTree::shipped());
  table.on_sample([&](const ClassFeatures& known, Class) {
    ++said[static_cast<size_t>(ClassTree::shipped().classify(known))];
  });
  const curm::Trace trace = curm::generate(*curm::find_profile("vm"), 9, 30'000);
  for (const curm::Request& request : trace.requests)
    table.see(request.offset >> 20, curm::access_of(request));
  for (const int times : said) EXPECT_GT(times, 0);
}

// On files that it did not learn from, the tree that ships is right more often than their most
// frequent class, and from the first file on.
TEST(ClassTree, TheOneThatShipsKnowsFilesWhenTheyAreMade) {
  ClassTable table(ClassTree::shipped());
  std::array<int, 3> said{};
  table.on_creation_sample([&](const CreationFeatures& known, Class) {
    ++said[static_cast<size_t>(ClassTree::shipped().classify(known))];
  });
  curm::show(curm::generate_files(99), 6 << 20, table);
  const ClassTable::Score& score = table.creation_score();
  EXPECT_GT(score.judged, 300U);
  EXPECT_GT(score.right, score.majority_right + score.judged / 4);
  for (const int times : said) EXPECT_GT(times, 0);
}

}  // namespace
}  // namespace stoker
