// blocks_in() of csrc/attention/cluster.cuh for a GPU that is not here: test_paged_attention.py.
#include "attention/cluster.cuh"

extern "C" int fp4_cluster_blocks(const int* alone, const int* paired, int programs, int slots) {
  fp4::attention::Room of_alone, of_paired;
  for (int blocks = 1; blocks <= fp4::attention::kMostBlocks; ++blocks) of_alone.clusters[blocks] = alone[blocks], of_paired.clusters[blocks] = paired[blocks];
  return fp4::attention::blocks_in(of_alone, of_paired, programs, slots);
}
