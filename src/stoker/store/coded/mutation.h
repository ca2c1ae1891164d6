// Deliberate bugs of a coded store (base/mutation.h), to show that its checker finds each
// (tests/crash/coded_mutation_test.cc).
#pragma once

#include "stoker/base/mutation.h"

namespace stoker::coded {

enum class Mutation {
  none,
  skip_flush,                 // what is appended is not flushed
  acknowledge_before_parity,  // a VAL goes to the data's shard and one parity only
  drop_commit,                // no COMMIT is written
  commit_before_blocks,       // a COMMIT names fresh stripes that are not durable
  val_without_flag,           // a VAL of a transaction counts by itself
  size_outside_commit,        // a COMMIT does not carry the new size
  delta_against_new,          // a fold takes the difference to what is new already
  apply_delta_twice,
  fold_oldest,       // a fold takes a block for newer than it is
  skip_stage,        // parity in place without a copy in the log
  skip_fold_record,  // blocks in place before the decision
  // a header says of blocks that they are there while they are not durable
  header_before_blocks,
  reuse_segment_early,
  ignore_epoch,          // a shard counts whatever its epoch is
  no_durable_exclusion,  // a shard that failed is left out in memory only
  admit_stale,           // a shard that comes back counts without having been resynced
  resync_without_vals,   // a shard that was resynced lacks what is in the logs
  skip_crc,              // blocks are taken as they are read
  // a parity is a source whatever versions it encodes; the CRC of what is decoded then tells, and
  // readers are refused
  decode_disagreeing,
  // the same, and nobody looks at that CRC: readers get bytes that nobody wrote
  decode_unchecked,
  believe_old_vals,  // a VAL below the base's version counts
  ignore_told,       // opening does not look at what frames tell of the rounds before
  settle_nothing,    // opening does not append what it chose where it is lacking
};

}  // namespace stoker::coded
