// Deliberate bugs of a cluster on files (base/mutation.h): flushes that are left out.
// tests/crash/curm_mutation_test.cc shows that each of them is needed, and that the tests find it
// missing.
#pragma once

#include "stoker/base/mutation.h"

namespace stoker::curm {

enum class Mutation {
  none,
  skip_log_flush,           // what was appended is acknowledged unflushed
  skip_data_flush,          // what was written in place, with the marks of it
  skip_parity_flush,        // the same of parities, and records in their reserves
  acknowledge_followers,    // who finds somebody flushing is answered at once
  count_late_writes,        // what came while a flush was under way counts as flushed by it
  skip_full_segment_flush,  // a segment is begun before the one that it follows is durable
  skip_begin_flush,         // and written to before its begin frame is
  skip_making_flush,        // a new cluster counts before its headers are durable
  skip_opening_flush,       // what a killed process left in the disks' caches is acted upon
  skip_proposal_flush,      // an opening is confirmed before it is proposed everywhere
  skip_confirmation_flush,  // and served before it is confirmed
  // files are made for a node before the head that says whose they are is durable
  skip_blanking_flush,
  skip_admission_flush,  // a rebuilt node counts before its head says so
};

}  // namespace stoker::curm
