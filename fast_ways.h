// fast_ways.h: what fast/ does in place of the plain ways.
#pragma once
#include "cs336.h"

struct AdamWScalars {  // of one step
    float decay, beta1, beta2, eps, step_size, gradient_scale;
};
AdamWScalars scalars_of(const AdamW& a, int t, float gradient_scale);  // t: the step, from 1
// Of one element. bf16 is rounded once, as it is stored: what PyTorch's fused AdamW does.
template <class P, class G>
HD inline void adamw_element(P* p_io, G g_in, P* m_io, P* v_io, AdamWScalars s) {
    Wide<P> p = *p_io, m = *m_io, v = *v_io, g = (Wide<P>)g_in * s.gradient_scale;
    m = s.beta1 * m + (1 - s.beta1) * g;
    v = s.beta2 * v + (1 - s.beta2) * g * g;
    p = p * s.decay - s.step_size * m / (std::sqrt(v) + s.eps);
    *p_io = p, *m_io = m, *v_io = v;
}
struct FlatGradient {
    Tensor g;
    int64_t offset;  // of its weights and moments, in their arenas
};
double square_sum(const vector<FlatGradient>& gradients);  // waits for the device
// For flat p, m and v; t: the step, from 1.
void adamw_update(const Tensor& p, const vector<FlatGradient>& gradients, const Tensor& m,
                  const Tensor& v, const AdamW& a, int t, float gradient_scale = 1);
using AdamWUpdate = void(const Tensor& p, const vector<FlatGradient>& gradients, const Tensor& m,
                         const Tensor& v, AdamWScalars s);
AdamWUpdate adamw_plain;  // the plain way of the same

// The fused ops of layers.cu, below the tape: each reads its last tensors and writes its first.
struct LayerOps {
    // A null delta: x is x_in.
    void (*add_rmsnorm)(const Tensor& y, const Tensor& x, const Tensor& r, const Tensor& x_in,
                        const Tensor& delta, const Tensor& w, float eps);
    // A null dx_low: nobody wants this copy of dx. `add`: to what the gradient holds.
    void (*rmsnorm_backward)(const Tensor& dx, bool add_dx, const Tensor& dx_low, const Tensor& dw,
                             bool add_dw, const Tensor& dy, const Tensor& x, const Tensor& r,
                             const Tensor& w);
    // Moves from qkv to q, k and v, and rotates; `backward`: the other way round. Null q, k and v:
    // rotates within qkv.
    void (*rotate)(const Tensor& qkv, const Tensor& q, const Tensor& k, const Tensor& v,
                   const Tensor& rope, bool backward);
    void (*swiglu)(const Tensor& g, const Tensor& h);
    void (*swiglu_backward)(const Tensor& dh, const Tensor& dg, const Tensor& h);
    void (*cross_entropy)(const Tensor& loss, const Tensor& lse, const Tensor& l,
                          const Tensor& targets);
    // dl may be l. The loss is the mean over N rows, of which l may hold a part.
    void (*cross_entropy_backward)(const Tensor& dl, const Tensor& l, const Tensor& lse,
                                   const Tensor& targets, const Tensor& dloss, int64_t N);
};
// What fast/ does in place of the plain ways, or besides; null without it.
struct FastWays {
    const LayerOps* layers;  // on the GPU
    AdamWUpdate* adamw;
    // It may keep a model's weights, in their place, in a form that only forward, backward and
    // AdamW can read. Whoever else reads or writes them restores them first.
    void (*keep_weights)(Model& model);
    void (*ready_weights)(Model& model);  // for a forward in this context
    void (*restore_weights)(Model& model);
    // The same for FSDP's part of a unit. Where it is kept so, `part` becomes a view in the dtype
    // that products take, while AdamW goes on with the shard's.
    void (*keep_part)(Tensor& part, DType products);
    bool (*restore_part)(Tensor& part);  // false: it was plain
    // CUDA graphs.
    bool (*graphs_take)(const Model& model);  // in this context
    Tensor (*forward_backward)(Model& model, const Batch& batch, float loss_scale,
                               const function<void()>& between);
    Tensor (*infer)(Model& model, const Tensor& tokens);
    // NCCL beside products; both of the first are collective.
    void (*allocate_shared)(const Communicator& c, const function<void()>& f);
    void (*free_shared)(const Communicator& c);
    WorkPtr (*all_reduce_beside)(const Communicator& c, const Tensor& t, Reduction how);
    WorkPtr (*run_behind)(const WorkPtr& work, const function<void()>& f);
};
inline FastWays fast_ways;
// Runs f, in which all ranks allocate what collectives move.
inline void allocate_shared(const Communicator& c, const function<void()>& f) {
    if (fast_ways.allocate_shared) {
        fast_ways.allocate_shared(c, f);
    } else {
        f();
    }
}
