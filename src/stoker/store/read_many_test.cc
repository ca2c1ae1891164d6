#include "stoker/store/read_many.h"

#include <gtest/gtest.h>

#include <vector>

#include "stoker/store/memory_store.h"

namespace stoker {
namespace {

class ReadMany : public testing::Test {
 protected:
  void SetUp() override {
    put("a", "0123456789");
    put("b", "abcdefghij");
  }
  void put(std::string_view key, std::string text) {
    const auto change = store_->begin().value();
    change->resize(key, text.size()).value();
    const Slice from{reinterpret_cast<std::byte*>(text.data()), text.size()};
    change->write(key, 0, from).wait().value();
    (void)change->commit(Durability::durable).wait().value();
  }
  Status read(std::vector<Piece> pieces) {
    const std::vector<std::string> keys{"a", "b", "gone"};
    return store_
        ->read_many(keys, pieces, {reinterpret_cast<std::byte*>(memory_.data()), memory_.size()})
        .wait();
  }

  Budget budget_{uint64_t{1} << 20};
  std::unique_ptr<Store> store_ = std::move(MemoryStore::make(budget_).value());
  std::string memory_ = std::string(8, '.');
};

TEST_F(ReadMany, EachPieceIsInItsPlace) {
  read({{1, 7, 3, 5}, {0, 0, 2, 0}, {1, 0, 0, 8}, {0, 9, 1, 3}}).value();
  EXPECT_EQ(memory_, "01.9.hij");
  read({}).value();
}

TEST_F(ReadMany, TheErrorIsTheFirstPiecesInOrder) {
  const Status status = read({{0, 0, 2, 0}, {2, 0, 1, 2}, {1, 9, 2, 3}});
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, Code::not_found);
  EXPECT_NE(status.error().what.find("gone"), std::string::npos) << status.error().what;
}

TEST_F(ReadMany, APieceOutsideTheMemoryOrOfNoKeyReadsNothing) {
  for (const Piece wrong : {Piece{0, 0, 2, 7}, Piece{0, 0, 1, ~uint64_t{0}}, Piece{3, 0, 1, 0}}) {
    const Status status = read({{0, 0, 2, 0}, wrong});
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().code, Code::invalid_argument);
    EXPECT_NE(status.error().what.find("piece 1"), std::string::npos) << status.error().what;
    EXPECT_EQ(memory_, "........");
  }
}

}  // namespace
}  // namespace stoker
