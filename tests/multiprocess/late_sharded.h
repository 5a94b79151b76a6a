// What the tests of DdpOptions::shard on the late device have in common.
#pragma once

#include <lockstep/lockstep.h>

namespace lockstep::test {

namespace to = torch::optim;

using ShardedAdamW = optim::Sharded<optim::AdamW>;

// Several buckets; tensors of half a bucket are cut.
inline const DdpOptions kSmallBuckets = {.bucket_bytes = 100'000, .first_bucket_bytes = 10'000};

inline DdpOptions with(Shard shard, DdpOptions options = kSmallBuckets) {
  options.shard = shard;
  options.shard_min_bytes = 0;
  return options;
}

}  // namespace lockstep::test
