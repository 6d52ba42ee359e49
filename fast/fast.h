// fast/fast.h: what tests want to see of the fast_*.cu, which nobody else names.
#pragma once
#include "cs336.h"

// fast/matmul.cu: a 16-bit product by each of the kernels among which it picks on a GPU.
std::vector<Tensor> gemm_by_each_kernel(const Tensor& a, bool ta, const Tensor& b, bool tb, DType dtype);

// fast/graphs.cu: where the buffers of a captured step lie, in one block. A rehearsal, the same step with buffers from
// the pool, shows which buffer is held from when to when; plan_places then lays them into a block that is not much
// larger than what the step holds at most.
struct StepPlaces : Places {
    struct Place {
        size_t bytes, offset;
        int from, to;  // when it is taken and given back, on a clock that counts both
    };
    std::shared_ptr<Memory> block;  // null in the rehearsal
    std::vector<Place> places;      // in the order of allocation
    int events = 0;                 // the clock
    size_t next = 0;                // with a block: the place to be taken next
    size_t take(size_t bytes, void** at) override;
    void give(size_t number) override;
};
size_t plan_places(StepPlaces& rehearsed);  // right after the rehearsal: sets the offsets; returns the block's bytes
extern int graph_launches;                  // of this process: two for each captured step, one for a forward alone
