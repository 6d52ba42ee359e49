// fsdp.cu: the 2026 handout's sections 7 and 9, in this order.
//   7  FSDP: what a rank keeps, its hooks before each unit, its optimizer, its trainer; then fsdp
//      (the check against one process) and fsdp_accounting
//   9  leaderboard: the 8.1B step
// Read the tables above start_gather and pre_forward first: which gathers and reduce-scatters a
// step starts, and when. fsdp_optimizer_step ends the step.
#include "ddp.h"
#include "fast_ways.h"

// -------------------------------------------------------------------------------------------------
// FSDP (Zhao et al., 2023; ZeRO-3; the 2026 handout): the weights are sharded, too. A rank keeps
// 1/N of each unit (the embedding, a block, the head) with its gradients and moments, in fp32 or,
// in pure bf16, in bf16. Norms are replicated.
//   forward    compute unit i; beside it gather unit i + 1
//   backward   compute unit i; beside it gather unit i - 1, reduce-scatter unit i + 1's gradients
// Whole units lie in two buffers by turns, unit i in number i % 2; gradients in two more. So a
// gather overwrites the unit two before it (see pre_forward).

// what is gathered at once; its elements are [begin, end) of the model's arena
struct FsdpUnit {
    int64_t begin = 0, end = 0;
    int64_t part = 0;           // elements that each rank keeps; the last ranks' may be padding
    int64_t offset = 0;         // of the own part, in Fsdp::shard
    Tensor own;                 // that part, as a gather takes it (see FastWays' keep_part)
    Tensor weights, gradients;  // whole, [world * part], while the unit has its buffer
    Tensor own_gradient;        // the own part's, averaged over the ranks; null until there is one
    // Its tensors that have a gradient, by their first elements. q and the joined qkv begin at the
    // same element; backward fills one of the two.
    std::multimap<int64_t, Tensor> slots;
};
// In the names of this file `norms` are the RMSNorms' weights, of which every rank has all, and
// `norm` is the norm of the gradients.

struct FsdpWait {  // of the compute stream (with Gloo the host), for a collective
    int unit;      // tests read it
    WorkPtr work;
    Mark asked, got;
};
struct Fsdp {
    Communicator c;
    vector<Parameter> parameters;
    vector<FsdpUnit> units;
    // the own part of each unit, then the norms; its `gradients` stay null
    ParameterGroup shard;
    int64_t norms_begin = 0;        // in the shard
    Tensor norms;                   // a view of the shard
    map<string, int64_t> norms_at;  // by name: its first element in `norms`
    Tensor norms_gradients;         // this rank's, of this backward
    Tensor norms_sum;               // the sum of their averages in this step; null: none yet
    int in_buffer[2] = {-1, -1};    // the unit whose weights each buffer has
    WorkPtr gathers[2];
    vector<FsdpWait> waits;  // of this step
    // Each unit takes its AdamW step before the unit below starts its reduce-scatter (unit 0: at
    // backward's end), and its gradient is not kept. So the step must have one backward, and need
    // no norm before: max_norm is 0, and the precision is not fp16, which the caller checks.
    // fsdp_optimizer_step still follows: it steps the RMSNorms' weights.
    bool steps_in_backward = false;
    // The lowest unit whose backward has begun; until forward comes to the head, the number of
    // units. start_reduce has run for every unit above it.
    int reached = 0;
    int reducing = -1;  // the unit whose reduce-scatter is under way; -1: none
    WorkPtr reduce;
    Tensor average;  // what it gives, of the own part
};
static Tensor own_part(const Fsdp& f, const FsdpUnit& unit, const Tensor& whole) {
    return view(whole, f.c.rank * unit.part, {unit.part});
}

// Returns the units, each with the range that its parameters have in lay_out_model's layout. The
// parameters come in the order of their offsets, so a unit's first one begins its range.
static vector<FsdpUnit> units_from(const vector<Parameter>& parameters) {
    vector<FsdpUnit> units;
    for (const Parameter& parameter : parameters) {
        if (parameter.unit == NORMS) { continue; }
        if (parameter.unit >= (int)units.size()) { units.resize(parameter.unit + 1); }
        FsdpUnit& unit = units[parameter.unit];
        if (unit.end == 0) { unit.begin = parameter.offset; }
        unit.end = parameter.offset + count(parameter.shape);
    }
    return units;
}

// Returns the layout: this rank's shard, and the buffers. The weights are not set. The shard has
// weight_dtype(). If that is fp32, weights are sent and used in compute_dtype. Unit 0, the
// embedding, stays fp32 even then: it is a look-up only, as under autocast. Gradients have the
// shard's dtype.
static shared_ptr<Fsdp> fully_shard(const Communicator& c, const vector<Parameter>& parameters,
                                    DType compute_dtype) {
    auto fsdp = make_shared<Fsdp>();
    fsdp->c = c;
    fsdp->parameters = parameters;
    fsdp->units = units_from(parameters);
    fsdp->reached = (int)fsdp->units.size();

    // The shard: the own parts, then the norms. norms_begin is the end of the parts so far.
    for (FsdpUnit& unit : fsdp->units) {
        unit.part = aligned((unit.end - unit.begin + c.world - 1) / c.world);
        unit.offset = fsdp->norms_begin;
        fsdp->norms_begin += unit.part;
    }
    int64_t end = 0;  // of the norms
    for (const Parameter& parameter : parameters) {
        if (parameter.unit != NORMS) { continue; }
        fsdp->norms_at[parameter.name] = end;
        end = aligned(end + count(parameter.shape));
    }
    const DType kept = weight_dtype();
    allocate_shared(c, [&] {
        fsdp->shard.weights = zeros({fsdp->norms_begin + end}, kept, PARAMETERS);
    });
    for (FsdpUnit& unit : fsdp->units) {
        unit.own = view(fsdp->shard.weights, unit.offset, {unit.part});
    }
    fsdp->norms = view(fsdp->shard.weights, fsdp->norms_begin, {end});
    fsdp->norms_gradients = zeros({end}, kept, GRADIENTS);

    // The buffers: each as large as the largest of its units. The weights' come from
    // allocate_shared (fast_ways.h), as the shard does: copy engines can gather. They cannot add,
    // so the gradients' do not.
    auto dtype_of = [&](size_t unit) { return unit == 0 || kept != F32 ? kept : compute_dtype; };
    for (size_t buffer = 0; buffer < 2; buffer++) {
        int64_t most = 0, weight_bytes = 0;  // most: elements of a unit
        for (size_t i = buffer; i < fsdp->units.size(); i += 2) {
            const int64_t n = c.world * fsdp->units[i].part;
            most = max(most, n);
            weight_bytes = max(weight_bytes, n * size_of(dtype_of(i)));
        }
        Tensor weights, gradients = empty({most}, kept, GRADIENTS);
        allocate_shared(c, [&] { weights = empty({weight_bytes}, U8, WEIGHT_COPIES); });
        for (size_t i = buffer; i < fsdp->units.size(); i += 2) {
            FsdpUnit& unit = fsdp->units[i];
            unit.gradients = view(gradients, 0, {c.world * unit.part});
            unit.weights = weights;
            unit.weights.dtype = dtype_of(i);
            unit.weights.shape = unit.gradients.shape;
        }
    }
    return fsdp;
}

// Returns a parameter's tensor (see Place): a view of its unit's buffer or, for a norm, of the
// shard. Enters it among its unit's slots.
static Tensor place(Fsdp& fsdp, const Parameter& parameter, const Shape& shape) {
    Tensor whole, gradients;
    int64_t at;
    if (parameter.unit == NORMS) {
        whole = fsdp.norms;
        gradients = fsdp.norms_gradients;
        at = fsdp.norms_at.at(parameter.name);
    } else {
        const FsdpUnit& unit = fsdp.units[parameter.unit];
        whole = unit.weights;
        gradients = unit.gradients;
        at = parameter.offset - unit.begin;
    }
    Tensor tensor = require_gradient(view(whole, at, shape));
    tensor.gradient->is_parameter = true;
    tensor.gradient->value = view(gradients, at, shape);
    if (parameter.unit != NORMS) { fsdp.units[parameter.unit].slots.emplace(at, tensor); }
    return tensor;
}

// -------------------------------------------------------------------------------------------------
// FSDP's hooks. begin_unit (model.cu) calls pre_forward(i) before unit i's ops, also where a
// checkpoint runs them again. end_unit puts a step on the tape that calls pre_backward(i) before
// unit i's backward. The head has no such step: its weights are still there. train_step calls
// finish_backward at the end. What these do in backward, from left to right, as far as there is
// such a unit (reduce: the reduce-scatter of a unit's gradients):
//
//                             waits for   starts    waits for   starts
//                             reduce      reduce    gather      gather
//   pre_backward(i), block i  i + 2       i + 1     i           i - 1, if that is a block
//   pre_backward(0)           2           1         -           -
//   finish_backward           1           0; waits for it, then all-reduces the norms' gradients
//
// Both gather columns are pre_forward(i)'s: it starts none whose weights are in their buffer.

// Starts the gather of unit i into its buffer, in the dtype that its products take.
static void start_gather(Fsdp& fsdp, int i) {
    const FsdpUnit& unit = fsdp.units[i];
    const bool casts = unit.weights.dtype != unit.own.dtype;
    if (casts) {
        // A checkpoint's second run may overwrite a gather that nobody waited for (see
        // pre_forward).
        wait(fsdp.c, fsdp.gathers[i % 2]);
        copy_or_add(own_part(fsdp, unit, unit.weights), unit.own, false);
    }
    // A cast has put this rank's part into the buffer. Else the gather reads it from the shard.
    fsdp.gathers[i % 2] = all_gather(fsdp.c, unit.weights, casts ? Tensor() : unit.own);
    fsdp.in_buffer[i % 2] = i;
}
static void wait_for(Fsdp& f, int unit, const WorkPtr& work) {
    const Mark asked = mark();
    wait(f.c, work);
    f.waits.push_back({unit, work, asked, mark()});
}

// Waits for unit i's weights. It gathers them first if they are not in their buffer: those of unit
// 0 in forward, and of unit g (below). Then it starts the gather of `next`, unless that is in its
// buffer, or is the embedding, which backward does not need. Of U units:
//
//                                     reached   next
//   forward, unit i < U - 1           U         i + 1
//   forward, the head, i = U - 1      U - 1     i - 1, which is still in its buffer
//   backward, block i                 i         i - 1
//   units g to r - 1 of a checkpoint run again, after unit r's backward:
//     unit i < r - 1                  r         i + 1
//     unit r - 1                      r         i - 1, in its buffer if it is one of these units
//
// Unit r's backward has started the gather of r - 1 already. If unit g needs the same buffer, that
// gather is lost.
static void pre_forward(Fsdp& fsdp, int i) {
    Range range("gather");
    if (fsdp.in_buffer[i % 2] != i) { start_gather(fsdp, i); }
    wait_for(fsdp, i, fsdp.gathers[i % 2]);
    if (i + 1 == (int)fsdp.units.size()) { fsdp.reached = i; }  // here forward ends

    const bool goes_up = i + 1 < fsdp.reached;
    const int next = goes_up ? i + 1 : i - 1;
    // The handout's rule: start a gather only when the layer two before it has finished. That layer
    // is the one that had next's buffer: unit i - 1 on the way up, i + 1 on the way down. Its ops
    // are queued on the compute stream already, and a gather starts behind what is queued. So the
    // rule holds by the order of the queue.
    if (next > 0 && fsdp.in_buffer[next % 2] != next) {  // backward needs no embedding
        start_gather(fsdp, next);
    }
}

// Zeroes what has no gradient: padding, the place of the norm within a block, and parameters that
// this rank's loss did not depend on.
static void zero_the_rest(FsdpUnit& unit) {
    int64_t end = 0;
    auto zero_up_to = [&](int64_t begin) {
        if (begin > end) { fill_zero(view(unit.gradients, end, {begin - end})); }
    };
    for (const auto& [begin, tensor] : unit.slots) {
        if (!tensor.gradient->filled) { continue; }
        zero_up_to(begin);
        end = begin + tensor.size();
        tensor.gradient->filled = false;  // the next backward overwrites it
    }
    zero_up_to(unit.gradients.size());
}

// Steps the weights at each gradient's offset in the shard: a unit's own part, or all norms.
static void step_shard(Fsdp& fsdp, const FlatGradients& gradients, float gradient_scale) {
    NoGrad no_grad;
    ParameterGroup& group = fsdp.shard;
    adamw_update(group.weights, gradients, group.m, group.v,
                 scalars_of(group.adamw, group.step, gradient_scale));
}

// Waits for the reduce-scatter under way. Then AdamW takes the unit's step, or the unit keeps the
// average, or adds it to that of an earlier backward.
static void finish_reduce(Fsdp& fsdp) {
    if (fsdp.reducing < 0) { return; }
    wait_for(fsdp, fsdp.reducing, fsdp.reduce);
    FsdpUnit& unit = fsdp.units[fsdp.reducing];
    if (fsdp.steps_in_backward) {
        step_shard(fsdp, {{fsdp.average, unit.offset}}, 1);
    } else if (unit.own_gradient) {
        copy_or_add(unit.own_gradient, fsdp.average, true);
    } else {
        unit.own_gradient = fsdp.average;
    }
    fsdp.average = Tensor();
    fsdp.reducing = -1;
}

// Starts the reduce-scatter of unit i's gradients.
static void start_reduce(Fsdp& fsdp, int i) {
    Range range("reduce");
    // Of unit i + 1, whose buffer backward is about to fill with unit i - 1's gradients.
    finish_reduce(fsdp);
    FsdpUnit& unit = fsdp.units[i];
    zero_the_rest(unit);
    // The average may stay in the buffer of the unit's gradients: finish_reduce steps it before
    // backward comes to unit i - 2, which writes there next.
    fsdp.average = fsdp.steps_in_backward ? own_part(fsdp, unit, unit.gradients)
                                          : empty({unit.part}, unit.gradients.dtype, GRADIENTS);
    fsdp.reduce = reduce_scatter(fsdp.c, unit.gradients, AVERAGE, fsdp.average);
    fsdp.reducing = i;
}

// Unit i + 1's gradients are complete when backward comes to unit i. Unit i's weights may have been
// overwritten since forward.
static void pre_backward(Fsdp& f, int i) {
    start_reduce(f, i + 1);
    f.reached = i;
    // Unit 0's backward, a look-up's, needs no weights, only the buffer for gradients.
    if (i > 0) { pre_forward(f, i); }
}

static void add_hooks(Model& model, Fsdp& f) {  // to a model that has been placed
    model.weights = f.shard.weights;
    // Not null: without an arena zero_gradients drops each slot's gradient, here a view of its
    // unit's buffer. Backward would then write elsewhere, and start_reduce would send old numbers.
    model.gradients = f.norms_gradients;
    model.pre_forward = [&f](int unit) { pre_forward(f, unit); };
    model.pre_backward = [&f](int unit) { pre_backward(f, unit); };
}
// Returns a Transformer whose weights are f's, which has to outlive it.
static Model sharded_model(const ModelConfig& config, Fsdp& f) {
    Model model = lay_out_model(config);
    place_weights(model,
                  [&](const Parameter& p, const Shape& shape) { return place(f, p, shape); });
    add_hooks(model, f);
    return model;
}

// -------------------------------------------------------------------------------------------------
// FSDP's step: begin_fsdp_step, then forward, backward and finish_backward for each batch, then
// fsdp_optimizer_step.

// Makes the next pre_forward gather anew, because the weights have changed.
static void forget_gathered(Fsdp& f) { f.in_buffer[0] = f.in_buffer[1] = -1; }

static void begin_fsdp_step(Fsdp& f) {
    f.waits.clear();
    if (f.steps_in_backward) { begin_adamw_step(f.shard, f.shard.weights); }
}

// Ends each backward: own gradients then are averages, or sums of them, or already stepped.
static void finish_backward(Fsdp& fsdp) {
    Range range("synchronize gradients");
    start_reduce(fsdp, 0);
    finish_reduce(fsdp);
    fsdp.reached = (int)fsdp.units.size();

    const Tensor& gradients = fsdp.norms_gradients;
    wait_for(fsdp, NORMS, all_reduce(fsdp.c, gradients, AVERAGE));
    const bool is_first = !fsdp.norms_sum;
    if (is_first) { fsdp.norms_sum = empty(gradients.shape, gradients.dtype, GRADIENTS); }
    copy_or_add(fsdp.norms_sum, gradients, !is_first);
    fill_zero(gradients);  // the next loss might depend on some of them only
}

// Returns the gradients that this rank has now: its parts of units, and the norms'.
static FlatGradients gradients_of(const Fsdp& f) {
    FlatGradients all;
    for (const FsdpUnit& unit : f.units) {
        if (unit.own_gradient) { all.push_back({unit.own_gradient, unit.offset}); }
    }
    all.push_back({f.norms_sum, f.norms_begin});
    return all;
}
// Returns the norm of all gradients, over all ranks.
static double sharded_norm(const Fsdp& f) {
    FlatGradients gradients = gradients_of(f);
    // The last ones are the norms', the same on every rank: only rank 0 counts them.
    if (f.c.rank > 0) { gradients.pop_back(); }
    return norm_over_ranks(f.c, square_sum(gradients));
}

// Steps what backward has not stepped, and returns the norm, as optimizer_step does. Then neither
// the gradients nor the gathered weights are of use any more.
static double fsdp_optimizer_step(Fsdp& f, LossScaler& scaler, double max_norm) {
    auto step = [&](float gradient_scale) {
        if (!f.steps_in_backward) { begin_adamw_step(f.shard, f.shard.weights); }
        step_shard(f, gradients_of(f), gradient_scale);
    };
    const double norm = guarded_step(
        scaler, max_norm, [&] { return sharded_norm(f); }, step);
    for (FsdpUnit& unit : f.units) { unit.own_gradient = Tensor(); }
    f.norms_sum = Tensor();
    forget_gathered(f);
    return norm;
}

// -------------------------------------------------------------------------------------------------
// FSDP's weights from outside, and its trainer

// Calls `see` with every parameter in turn, whole, in the shard's dtype. With `write`, what `see`
// leaves there is cut up again. Every rank has to call it.
static void visit_whole(Fsdp& fsdp, bool write,
                        const function<void(const Parameter&, const Tensor& whole)>& see) {
    for (const Parameter& parameter : fsdp.parameters) {
        if (parameter.unit != NORMS) { continue; }
        see(parameter, view(fsdp.norms, fsdp.norms_at.at(parameter.name), parameter.shape));
    }
    for (int i = 0; i < (int)fsdp.units.size(); i++) {
        FsdpUnit& unit = fsdp.units[i];
        const bool restored = fast_ways.restore_part && fast_ways.restore_part(unit.own);
        const Tensor whole = empty({fsdp.c.world * unit.part}, unit.own.dtype, WORKSPACE);
        wait(fsdp.c, all_gather(fsdp.c, whole, unit.own));
        for (const Parameter& parameter : fsdp.parameters) {
            if (parameter.unit == i) {
                see(parameter, view(whole, parameter.offset - unit.begin, parameter.shape));
            }
        }
        if (write) { copy(unit.own, own_part(fsdp, unit, whole)); }
        if (restored) { fast_ways.keep_part(unit.own, unit.weights.dtype); }
    }
    if (write) { forget_gathered(fsdp); }
}
// Lets fast/ keep this rank's parts in a form that a gather sends without a cast.
static void keep_parts(Fsdp& f) {
    if (!fast_ways.keep_part) { return; }
    for (FsdpUnit& unit : f.units) { fast_ways.keep_part(unit.own, unit.weights.dtype); }
}

// Returns a trainer whose model, made from seed, is sharded over the ranks.
static Trainer fsdp_trainer(const Communicator& c, const ModelConfig& config, uint64_t seed,
                            bool steps_in_backward = false, const AdamW& adamw = {}) {
    Trainer trainer;
    trainer.c = c;
    trainer.f = fully_shard(c, lay_out_model(config).parameters, matmul_dtype());
    Fsdp& fsdp = *trainer.f;
    trainer.model = sharded_model(config, fsdp);
    visit_whole(fsdp, true,
                [&](const Parameter& p, const Tensor& whole) { init_weight(whole, p.name, seed); });
    fsdp.shard.adamw = adamw;
    fsdp.steps_in_backward = steps_in_backward;
    keep_parts(fsdp);

    trainer.before_step = [&fsdp] { begin_fsdp_step(fsdp); };
    trainer.after_backward = [&fsdp] { finish_backward(fsdp); };
    trainer.step_optimizer = [&fsdp](Trainer& t) {
        return fsdp_optimizer_step(fsdp, t.scaler, t.max_norm);
    };
    // A wait lies inside some part of the step, the last one that had begun by then: its time moves
    // from there to `exposed`.
    trainer.add_communication = [&fsdp](const Trainer& t, StepTimes& times) {
        for (const FsdpWait& stall : fsdp.waits) {
            size_t i = t.marks.size() - 2;  // the last mark is the step's end
            while (i > 0 && ms_of(stall.asked, t.marks[i].at) < 0) { i--; }
            const double waited = ms_of(stall.got, stall.asked);
            times.*t.marks[i].part -= waited;
            times.exposed += waited;
        }
    };
    return trainer;
}

// -------------------------------------------------------------------------------------------------
// fsdp: N ranks against one process that sees the whole batch, as in ddp.cu, in the cases of this
// table.

constexpr int STEPS = 3;

struct FsdpCase {
    Precision precision;
    Mode mode;
    const char* checkpoint = "none";
    int batches = 1;  // backwards per step, whose gradients add up
};
static const vector<FsdpCase> fsdp_cases = {{FP32, EAGER},           {FP32, FUSED},
                                            {FP32, FLASH},           {PREC_BF16, EAGER},
                                            {PREC_BF16, FUSED},      {PREC_FP16, EAGER},
                                            {PREC_FP16, FUSED},      {FP32, FUSED, "1"},
                                            {FP32, FUSED, "2"},      {FP32, FUSED, "ffn"},
                                            {FP32, FUSED, "nested"}, {FP32, FUSED, "1", 2},
                                            {PREC_PURE_BF16, FUSED}, {PREC_PURE_BF16, FUSED, "1"}};

// Trains in one case with FSDP and, on rank 0, in one process, and returns how their weights differ
// there. What the other ranks gather must be the same bits.
static WeightsCheck check_case(const Communicator& c, const FsdpCase& tried, uint64_t seed) {
    context.precision = tried.precision;
    context.mode = tried.mode;
    context.checkpoint = checkpointing_from(tried.checkpoint);
    WeightsCheck check{string("FSDP, ") + name_of(tried.precision),
                       strprintf("mode %s, checkpoint %s, %s per step", name_of(tried.mode),
                                 tried.checkpoint, counted(tried.batches, "backward").c_str())};

    const ModelConfig config = {"lm", 32, 48, 3, 2, VOCABULARY};
    AdamW adamw;
    adamw.eps = 1e-3f;  // else a gradient of mere rounding errors moves its weight by lr
    double atol = 1e-4, rtol = 1e-4;
    if (tried.precision == FP32) {
        adamw.eps = 1e-5f;
        atol = 1e-6;
    }
    if (tried.precision == PREC_PURE_BF16) {
        adamw.lr = 0.02f;  // in bf16 a weight is rounded, so a small step may be none
        // In a step rounding may turn a weight's last bit, 2^-7 of it or less. Two turned bits are
        // within these bounds. A third one is not always; it did not occur in 3800 runs with 2 to 8
        // ranks and twice the width.
        atol = 2e-3;
        rtol = 1.0 / 64;
    }

    Trainer ours = fsdp_trainer(c, config, seed, false, adamw), whole;
    whole.model = make_model(config);  // random_model may give another form (fast_ways.h)
    whole.adamw = adamw;
    init_weights(whole.model, seed);
    make_gradients(whole.model);
    ours.scaler.scale = whole.scaler.scale = 1024;  // a power of two: unscaling is exact
    Fsdp& fsdp = *ours.f;
    uint64_t bits = 0;  // of all weights
    for (int step = 0; step < STEPS; step++) {
        train_both(c, ours, whole, seed + step, tried.batches);
        visit_whole(fsdp, false, [&](const Parameter& parameter, const Tensor& got) {
            const Tensor want = view(whole.model.weights, parameter.offset, parameter.shape);
            if (c.rank == 0) { compare(check, got, want, rtol, atol); }
            bits = 31 * bits + key_of_bits(got);
        });
    }
    check.match &= same_everywhere(c, bits);
    return check;
}

// Checks all cases that run on this device, and prints the table and the answer.
int cmd_fsdp(const Options& options) {
    return run_ranks(options, [&](const Communicator& c) {
        vector<WeightsCheck> checks;
        for (const FsdpCase& tried : fsdp_cases) {
            if (tried.mode == FLASH && !fastest_flash(context.device, F32, 16)) { continue; }
            checks.push_back(check_case(c, tried, options.seed));
        }
        print_checks(c, options, STEPS,
                     "Transformer: d_model 32, 3 layers; AdamW with lr 0.001, in pure_bf16 0.02",
                     checks);
    });
}

// -------------------------------------------------------------------------------------------------
// fsdp_accounting: (a) what a rank holds at its peak with plain data parallel training, with the
// optimizer sharded, and with FSDP; (b) how long each unit's gather took, and how long the compute
// stream waited for it.

// the first three ways; the fourth is FSDP with steps_in_backward
enum Way { PLAIN_DDP, SHARDED_OPTIMIZER, FULLY_SHARDED };
struct FsdpRun : WayRun {
    vector<double> gather_ms{}, wait_ms{};  // of each unit in forward, in the mean step
};

// Adds 1/`steps` of the last step's times, so that after all timed steps they are means. A step's
// first waits are forward's, one per unit, in order: waits[i] is unit i's.
static void add_unit_times(const Fsdp& fsdp, int steps, FsdpRun& run) {
    const size_t units = fsdp.units.size();
    run.gather_ms.resize(units);
    run.wait_ms.resize(units);
    for (size_t i = 0; i < units; i++) {
        const FsdpWait& stall = fsdp.waits[i];
        run.gather_ms[i] += ms_of(stall.work->end, stall.work->begin) / steps;
        run.wait_ms[i] += ms_of(stall.got, stall.asked) / steps;
    }
}

// Prints (a)'s table, a row for each way, and (b)'s, a row for each of FSDP's units.
static void print_fsdp_accounting(const string& caption, const vector<FsdpRun>& runs) {
    Table memory{caption +
                     "; (a): rank 0 at its peak, MiB; copies: buffers for gathered weights, and "
                     "weights in 16 bits; other: activations, workspace and inputs; "
                     "early AdamW: each unit's step in backward" +
                     (context.mode == EAGER ? "; DDP's AdamW runs op by op, the others' is fused"
                                            : ""),
                 {"Way", "peak", "predicted", "parameters", "copies", "gradients", "optimizer",
                  "other", "step (ms)"}};
    for (const FsdpRun& run : runs) {
        const string predicted = mib_cell(run.predicted);
        if (run.oom) {
            memory.row(run.name, oom_cell(run.predicted), predicted, "", "", "", "", "", "");
            continue;
        }
        const size_t peak = run.use.peak;
        const size_t* by = run.use.peak_by;
        const size_t known = by[PARAMETERS] + by[WEIGHT_COPIES] + by[GRADIENTS] + by[OPTIMIZER];
        memory.row(run.name, mib_cell(peak), predicted, mib_cell(by[PARAMETERS]),
                   mib_cell(by[WEIGHT_COPIES]), mib_cell(by[GRADIENTS]), mib_cell(by[OPTIMIZER]),
                   mib_cell(peak - known), run.ms.total.mean);
    }
    print(memory);

    const FsdpRun& fsdp = runs[FULLY_SHARDED];
    Table times{"(b): FSDP's all-gathers in forward, and its waits for them, ms; rank 0, mean step",
                {"unit", "gather", "wait"}};
    for (size_t i = 0; i < fsdp.gather_ms.size(); i++) {
        string unit = i == 0 ? "embedding" : strprintf("layer %zu", i - 1);
        if (i + 1 == fsdp.gather_ms.size()) { unit = "lm_head"; }
        times.row(unit, strprintf("%.3f", fsdp.gather_ms[i]), strprintf("%.3f", fsdp.wait_ms[i]));
    }
    if (!times.rows.empty()) { print(times); }
}

// Lists how many MiB more (+) or less than expected FSDP's peak has of each category, the largest
// first. FSDP should save `saved` bytes of weights, as many of gradients, and `moments` of AdamW's
// state.
static string causes(const MemoryUse& other, const MemoryUse& fsdp, double saved, double moments) {
    std::multimap<double, string> parts;
    for (auto [category, expected] : {pair(PARAMETERS, saved),
                                      {GRADIENTS, saved},
                                      {OPTIMIZER, moments},
                                      {WEIGHT_COPIES, 0.0},
                                      {WORKSPACE, 0.0},
                                      {ACTIVATIONS, 0.0}}) {
        const double mib =
            mib_of((double)fsdp.peak_by[category] - (double)other.peak_by[category] + expected);
        if (fabs(mib) >= 0.05) {
            parts.insert({-fabs(mib), strprintf("%s %+.1f", name_of(category), mib)});
        }
    }
    vector<string> all;
    for (const auto& part : parts) { all.push_back(part.second); }
    return all.empty() ? "" : " (MiB: " + list_of(all) + ")";
}

// Answers (a) and (b). runs: by Way; psi: parameters; bytes: of a weight.
static void answer_fsdp_accounting(const vector<FsdpRun>& runs, int world, double psi, int bytes) {
    // Bytes that a rank holds. The sharded optimizer has all weights and gradients and 1/N of both
    // moments: half as DDP, half as FSDP.
    const double N = world, of_ddp = 4 * bytes * psi, of_fsdp = of_ddp / N;
    const double of_sharded = (of_ddp + of_fsdp) / 2;
    answer("a",
           "FSDP should save %.1f MiB against DDP and %.1f MiB against a sharded optimizer. "
           "Weights, gradients and two moments take %d Psi bytes with DDP, (%d + %d/N) Psi with "
           "the sharded optimizer and %d Psi/N with FSDP (Psi = %.4g, N = %d).",
           mib_of(of_ddp - of_fsdp), mib_of(of_sharded - of_fsdp), 4 * bytes, 2 * bytes, 2 * bytes,
           4 * bytes, psi, world);
    const FsdpRun& fsdp = runs[FULLY_SHARDED];
    if (fsdp.oom) { return answer("a", "There was no room for FSDP."); }

    // held: the bytes that a rank holds; moments: those of AdamW's state that FSDP saves. The
    // division by 4: FSDP saves as much in weights, in gradients and in each moment.
    auto answer_against = [&](const FsdpRun& run, const char* name, double held, double moments) {
        if (run.oom) { return answer("a", "There was no room for %s.", name); }
        const double saved = mib_of((double)run.use.peak - (double)fsdp.use.peak);
        const double saved_beyond = saved - mib_of(held - of_fsdp);
        answer("a", "FSDP takes %.1f MiB %s than %s. It takes %.1f MiB %s than expected%s.",
               fabs(saved), saved < 0 ? "more" : "less", name, fabs(saved_beyond),
               saved_beyond < 0 ? "more" : "less",
               causes(run.use, fsdp.use, (of_ddp - of_fsdp) / 4, moments).c_str());
    };
    answer_against(runs[PLAIN_DDP], "DDP", of_ddp, (of_ddp - of_fsdp) / 2);
    answer_against(runs[SHARDED_OPTIMIZER], "the sharded optimizer", of_sharded, 0);

    double gathers = 0, waits = 0, late = 0;  // of those in forward that have a block to hide under
    for (size_t unit = 2; unit < fsdp.gather_ms.size(); unit++) {
        gathers += fsdp.gather_ms[unit];
        waits += fsdp.wait_ms[unit];
        late += fsdp.wait_ms[unit] > 0.05 * fsdp.gather_ms[unit];
    }
    answer(
        "b",
        "Gathers after layer 0 (%zu) take %.3f ms, and forward waits %.3f ms for them. Late, by "
        "over 5 %% of a gather's time: %.0f. No block runs before the gathers of the embedding and "
        "of layer 0: forward waits %.3f and %.3f ms for them.",
        fsdp.gather_ms.size() - 2, gathers, waits, late, fsdp.wait_ms[0], fsdp.wait_ms[1]);
}

// Times the four ways (in fp16 three, without AdamW in backward), and prints tables and answers.
// The times of gathers are those of the way FSDP.
int cmd_fsdp_accounting(const Options& typed) {
    return run_ranks(typed, [&](const Communicator& c) {
        Options options = typed;
        const ModelConfig config = choose_step(options, c);
        const uint64_t seed = options.seed;
        vector<FsdpRun> runs;
        Traces traces;
        auto add = [&](const char* name, const MakeTrainer& make) {
            FsdpRun& run = runs.emplace_back(FsdpRun{{name}});
            run_way(run, c, options, make, [&](Trainer& t) {
                if (t.f && t.steps > options.warmup[0]) {
                    add_unit_times(*t.f, options.steps, run);
                }
                trace_step(t, name, options, traces);
            });
        };
        add("DDP", [&](auto& c) {
            return data_parallel_trainer(c, random_model(config, seed), OVERLAPPED);
        });
        add("sharded optimizer",
            [&](auto& c) { return sharded_trainer(c, random_model(config, seed), ZERO1); });
        add("FSDP", [&](auto& c) { return fsdp_trainer(c, config, seed); });
        if (context.precision != PREC_FP16) {  // its step needs a norm first
            add("FSDP, early AdamW", [&](auto& c) { return fsdp_trainer(c, config, seed, true); });
        }

        const string caption = caption_of(options, config, c);
        write_trace(options.trace, traces, caption, c);
        print_fsdp_accounting(caption, runs);
        if (can_compare(c, runs, false)) {
            answer_fsdp_accounting(runs, c.world, parameters_of(config),
                                   (int)size_of(weight_dtype()));
        }
    });
}

// -------------------------------------------------------------------------------------------------
// The 2026 handout's leaderboard: a bf16 step of an 8.1B model on two sequences of 32,768 tokens.

struct LeaderboardRun : WayRun {
    int world = 1;
    double tokens = 0, flops = 0;  // of a step, all ranks'
    double first_loss = 0;
    double tflops() const { return flops / ms.total.mean / 1e9; }  // per second, of all ranks
};

// Returns the FLOPs of a step, without what checkpoints run again. Forward has a product for each
// weight and backward two; of attention's scores the causal half counts, in two products in forward
// and five in backward (one makes the scores again).
static double step_flops(const ModelConfig& config, double B, double T) {
    const double C = config.d_model, F = config.d_ff, L = config.num_layers;
    // the embedding is a look-up
    const double weights = L * (4 * C * C + 3 * C * F) + config.vocab_size * C;
    return 6 * B * T * weights + 7 * B * T * T * C * L;
}

// Returns a function that makes the step's trainer. leaderboard() has it take its sequences one by
// one, a backward each.
static MakeTrainer trainer_of(const Options& options) {
    return [&options, config = configs_of(options)[0]](const Communicator& c) {
        if (c.world > 1) { return fsdp_trainer(c, config, options.seed); }
        Trainer trainer;
        trainer.model = random_model(config, options.seed);
        make_optimizer_state(trainer.model);
        if (options.batch_size > 1) { make_gradients(trainer.model); }  // they add up there
        return trainer;
    };
}

// Sets what runs again in backward, context's recompute and checkpoint: the first of these that
// leaves each of `world` ranks a predicted peak of at most `room` bytes. In brackets what it costs
// per block and sequence of 8B on an H200:
//   0. nothing
//   1. all norms and SwiGLUs (0.8 ms)
//   2. as 1, and the feed-forwards of n blocks (9 ms)
//   3. as 1, and all feed-forwards, and n blocks whole (24 ms more for each of the n)
// With results in host memory (fast_ways.h) 2 and 3 cost less. The peak falls nearly in a straight
// line with n. So two plans, for n = 0 and for all blocks, give a first n, which grows until its
// plan fits or it is all blocks.
static void choose_what_runs_again(const Options& options, int world, double room) {
    // Returns a plan's peak. It leaves in the context what it planned: an early return keeps that.
    auto peak_with = [&](bool recompute, const Checkpointing& checkpoint) {
        context.recompute = recompute;
        context.checkpoint = checkpoint;
        return (double)steps_peak(world, options, trainer_of(options), options.batch_size);
    };
    if (peak_with(false, {}) <= room) { return; }
    const double norms_again = peak_with(true, {});
    if (norms_again <= room) { return; }

    // BLOCKS with n = 0: no block whole, so the feed-forwards of all
    const double ffns_again = peak_with(true, {Checkpointing::BLOCKS, 0});
    const double blocks_again = peak_with(true, {Checkpointing::GROUPS, 1});
    const int L = configs_of(options)[0].num_layers;
    auto enough = [&](double from, double to) {
        return (int)ceil(L * (from - room) / (from - to));
    };
    if (ffns_again <= room) {
        context.checkpoint = {Checkpointing::FFN, enough(norms_again, ffns_again)};
    } else if (blocks_again <= room) {
        context.checkpoint = {Checkpointing::BLOCKS, enough(ffns_again, blocks_again)};
    } else {
        return;  // with the last plan, of whole blocks, which is too large
    }
    int& n = context.checkpoint.n;
    while (n < L && peak_with(true, context.checkpoint) > room) { n++; }
}

// Prints two tables: the parts of a step; and, if it fits, its rates, memory and losses.
static void print_leaderboard(const LeaderboardRun& run, const string& caption) {
    Table parts = step_table(caption, "Model");
    add_step(parts, run);
    print(parts);
    if (run.oom) { return; }

    Table table{
        "The same steps; head and loss, with the head's gradients, come between forward and "
        "backward; first loss: of step 1, warm-up included",
        {"head and loss ms", "tokens/s", "TFLOP/s", "MFU %", "predicted MiB", "peak MiB",
         "first loss", "last loss"}};
    table.row(strprintf("%.2f", run.ms.head_and_loss.mean),
              strprintf("%.0f", run.tokens / run.ms.total.mean * 1e3), run.tflops(),
              percent_of_peak(run.tflops() / run.world, context.precision), mib_cell(run.predicted),
              mib_cell(run.use.peak), strprintf("%.5f", run.first_loss),
              strprintf("%.5f", run.loss));
    print(table);
}
static void answer_leaderboard(const LeaderboardRun& r) {
    answer("",
           "A step of %s on %s takes %.1f ms (mean of %s): %.4g TFLOP/s in all. The peak is %.4g "
           "GiB per rank.",
           r.name.c_str(), counted(r.world, "rank").c_str(), r.ms.total.mean,
           counted(r.ms.total.n, "step").c_str(), r.tflops(), to_gib(r.use.peak));
}

// Times the step on these ranks, or in one process, and prints tables and answer.
static void leaderboard(Options options, const Communicator& c) {
    const ModelConfig config = choose_step(options, c);
    if (options.quick && !options.has("batch_size")) { options.batch_size = c.world; }
    if (options.batch_size % c.world != 0) {
        usage_error("--batch_size: got %d, takes a multiple of %d, the number of ranks",
                    options.batch_size, c.world);
    }
    if (context.mode == EAGER || context.precision == PREC_FP16) {
        usage_error("--mode %s, --precision %s: takes mode fused or flash, and not fp16",
                    name_of(context.mode), name_of(context.precision));
    }

    context.head_chunk = 2048;  // rows of the logits that the loss makes at a time
    // no CUDA graph: events stand between the parts; kernels this long hide the launches
    context.each_launch = true;
    LeaderboardRun run{{config.name}};
    run.world = c.world;
    run.tokens = (double)options.batch_size * options.context_length;
    run.flops = step_flops(config, options.batch_size, options.context_length);
    options.batch_size /= c.world;
    // Up to half of the host's free memory may hold checkpoints' results.
    const bool keeps = context.device == CUDA && fast_ways.keep_on_host;
    if (keeps) { fast_ways.keep_on_host(room_of_each_rank(c, CPU) / 2); }
    // The step's peak and a thirtieth more, for NCCL, cuBLAS and the gaps between buffers, must
    // fit.
    if (!options.has("checkpoint")) {
        choose_what_runs_again(options, c.world, room_of_each_rank(c) * 30.0 / 31);
    }

    auto see = [&](Trainer& trainer) {
        if (trainer.steps == 1) { run.first_loss = mean_over_ranks(c, trainer.loss); }
        if (trainer.steps > 0) { return; }
        // The head's unit, after the blocks, begins the part head_and_loss.
        trainer.model.pre_forward = [&trainer, head = config.num_layers + 1,
                                     hook = trainer.model.pre_forward](int unit) {
            if (unit == head) { trainer.marks.push_back({&StepTimes::head_and_loss, mark()}); }
            if (hook) { hook(unit); }
        };
    };
    run_way(run, c, options, trainer_of(options), see, options.batch_size);

    string kept;
    if (keeps && !run.oom && fast_ways.kept_on_host() > 0) {
        kept = strprintf("; checkpoints keep %.3g GB of results per rank in host memory",
                         1e-9 * fast_ways.kept_on_host());
    }
    const string caption =
        caption_of(options, config, c) +
        strprintf(
            "; causal; a sequence per backward; %.4g FLOP per step, with attention's scores "
            "counted twice, and nothing else that runs again%s",
            run.flops, kept.c_str());
    print_leaderboard(run, caption);
    if (run.oom) { fail_without_step(run); }
    answer_leaderboard(run);
}

// By default two GPUs take part if there are two, else one process. Returns the exit code.
int cmd_leaderboard(const Options& typed) {
    Options options = typed;
    if (!options.has("nproc")) {
        const bool two_gpus = options.device != "cpu" && why_not("nccl", CUDA, 2).empty();
        options.nproc = two_gpus ? 2 : 1;
    }
    if (is_rank() || options.nproc > 1 || options.has("backend")) {
        return run_ranks(options, [&](const Communicator& c) { leaderboard(options, c); });
    }
    choose_device(options.device);
    leaderboard(options, {0, 1, 1, "none", nullptr});
    return 0;
}
