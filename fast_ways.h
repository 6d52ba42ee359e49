// fast_ways.h: what the plain files and fast/ share: AdamW on flat weights, a sigmoid, what
// attention's forward gives; and the tables by which fast/ enters layers.cu, flash.cu, model.cu,
// ddp.cu and fsdp.cu. Read these files' plain ways first: without fast/ they are all there is.
#pragma once
#include "cs336.h"

// -------------------------------------------------------------------------------------------------
// layers.cu: AdamW. An arena is one flat tensor with a value for each weight (see Model).

// The numbers of one step; t counts the steps from 1.
struct AdamWScalars {
    float decay, beta1, beta2, eps, step_size, gradient_scale;
};
AdamWScalars scalars_of(const AdamW& a, int t, float gradient_scale);
// Steps one element. bf16 is rounded once, as it is stored: what PyTorch's fused AdamW does.
template <class P, class G>
HD inline void adamw_element(P* p_io, G g_in, P* m_io, P* v_io, AdamWScalars s) {
    Wide<P> p = *p_io, m = *m_io, v = *v_io, g = (Wide<P>)g_in * s.gradient_scale;
    m = s.beta1 * m + (1 - s.beta1) * g;
    v = s.beta2 * v + (1 - s.beta2) * g * g;
    p = p * s.decay - s.step_size * m / (sqrt(v) + s.eps);
    *p_io = p;
    *m_io = m;
    *v_io = v;
}
// A gradient, and where its weights and moments begin in p, m and v, in elements.
struct FlatGradient {
    Tensor g;
    int64_t offset;
};
using FlatGradients = vector<FlatGradient>;
// Returns the sum of the squares of all gradients. Waits for the device.
double square_sum(const FlatGradients& gradients);
// Steps the weights that have these gradients, outside the tape. p, m and v are the weights and
// moments, flat and laid out alike: arenas, or a rank's shard of them.
using AdamWUpdate = void(const Tensor& p, const FlatGradients& gradients, const Tensor& m,
                         const Tensor& v, AdamWScalars s);
AdamWUpdate adamw_eager;   // op by op
AdamWUpdate adamw_plain;   // the plain loop, or on the GPU the plain kernel
AdamWUpdate adamw_update;  // the fastest way that is there

// SwiGLU's sigmoid, for layers.cu and fast/layers.cu.
template <class A>
HD inline A sigmoid_of(A a) {
    return 1 / (1 + exp(-a));
}

// -------------------------------------------------------------------------------------------------
// flash.cu: O [B,T,C] and L [B,H,T] of causal attention on qkv [B,T,3C]; nothing is recorded.
struct FlashOutputs {
    Tensor o, L;
};
FlashOutputs flash_outputs(const Tensor& qkv, int H);

// -------------------------------------------------------------------------------------------------
// The tables

// The fused ops of layers.cu, below the tape: layers.cu calls them, and records what they did. They
// read their last tensors and write the first: add_rmsnorm y, x and r, rmsnorm_backward dx, dx_low
// and dw, swiglu g, swiglu_backward dh.
struct LayerOps {
    // A null delta: x is x_in. r [N] is 1 / rms of each row of x, for backward.
    void (*add_rmsnorm)(const Tensor& y, const Tensor& x, const Tensor& r, const Tensor& x_in,
                        const Tensor& delta, const Tensor& w, float eps);
    // dx_low is a copy of dx in dy's dtype; null: nobody wants it. add_dx, add_dw: add to what dx
    // or dw holds.
    void (*rmsnorm_backward)(const Tensor& dx, bool add_dx, const Tensor& dx_low, const Tensor& dw,
                             bool add_dw, const Tensor& dy, const Tensor& x, const Tensor& r,
                             const Tensor& w);
    // Moves from qkv to q, k and v, and rotates; `backward`: the other way round. Null q, k and v:
    // rotates within qkv.
    void (*rotate)(const Tensor& qkv, const Tensor& q, const Tensor& k, const Tensor& v,
                   const Tensor& rope, bool backward);
    // h [..,2F] has SwiGLU's products with w1 and w3 side by side; g [..,F] is its output.
    void (*swiglu)(const Tensor& g, const Tensor& h);
    void (*swiglu_backward)(const Tensor& dh, const Tensor& dg, const Tensor& h);
};
// What fast/ does in place of the plain ways, or besides. Every field is null without fast/.
struct FastWays {
    const LayerOps* layers;  // on the GPU
    AdamWUpdate* adamw;
    // keep_weights may bring a model's weights, in their place, into a form that only forward,
    // backward and AdamW can read. All other code restores them before it reads or writes them (a
    // broadcast copies either form).
    void (*keep_weights)(Model& model);
    void (*ready_weights)(Model& model);  // forward calls it; restores them where context needs it
    void (*restore_weights)(Model& model);
    // The same for a part, which is what a rank keeps of an FSDP unit. Where keep_part changes the
    // form, `part` has the dtype `products` afterwards, in the same memory, and a gather sends it
    // as it is. AdamW is still given the whole shard in its own dtype, and finds changed parts by
    // their addresses. restore_part returns false if the form was the plain one.
    void (*keep_part)(Tensor& part, DType products);
    bool (*restore_part)(Tensor& part);
    // A CUDA graph launches all kernels of a pass, forward or backward, by one call. graphs_take
    // says whether graphs can run this model in this context.
    bool (*graphs_take)(const Model& model);
    Tensor (*forward_backward)(Model& model, const Batch& batch, float loss_scale,
                               const Job& between);
    Tensor (*infer)(Model& model, const Tensor& tokens);
    // NCCL beside products. All ranks call the first two together. allocate_shared runs f, and puts
    // what f allocates where copy engines can move it, if NCCL can (from 2.28 on). free_shared
    // frees what is not used any more.
    void (*allocate_shared)(const Communicator& c, const Job& f);
    void (*free_shared)(const Communicator& c);
    WorkPtr (*all_reduce_beside)(const Communicator& c, const Tensor& t, Reduction how);
    // Results of checkpoints that wait in host memory, so that backward need not compute them
    // again, in steps that no CUDA graph runs (context.each_launch). keep_on_host allows so many
    // bytes of it; 0: nothing is kept. kept_on_host returns the most that the latest forward has
    // used; a forward on META counts, too. model.cu gives its checkpoints keeping(f) in place of f,
    // but not nested ones. In the first run of such an f, linear (swiglu calls it) and
    // flash_outputs copy their results to the host, so nobody may write to these results
    // afterwards. In its second run they return the copies, and compute only what found no room.
    void (*keep_on_host)(size_t room);
    size_t (*kept_on_host)();
    function<UnaryOp> (*keeping)(const function<UnaryOp>& f);
    Tensor (*linear)(const Tensor& x, const Tensor& weight);
    FlashOutputs (*flash_outputs)(const Tensor& qkv, int H);
};
inline FastWays fast_ways;
// A file of fast/ enters its ways by a line that runs while the program loads, as AddRow's do:
//   static const EnterWays entered([] { fast_ways.adamw = update; });
struct EnterWays {
    EnterWays(const Job& enter) { enter(); }
};
// Runs f, in which all ranks allocate the tensors that collectives move.
inline void allocate_shared(const Communicator& c, const Job& f) {
    if (fast_ways.allocate_shared) {
        fast_ways.allocate_shared(c, f);
    } else {
        f();
    }
}
inline function<UnaryOp> keeping(const function<UnaryOp>& f) {
    return fast_ways.keeping ? fast_ways.keeping(f) : f;
}
