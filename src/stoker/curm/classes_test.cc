#include "stoker/curm/classes.h"

#include <gtest/gtest.h>
namespace stoker::curm {
namespace {
TEST(Classes, Parse) { EXPECT_EQ(ClassTree::shipped().classify({}), Class::read_write); }
}  // namespace
}  // namespace stoker::curm
