# Declarations of the C headers, and the struct that a call carries through its loops.

from libc.stdint cimport int64_t, uint16_t

cdef extern from "runtime.h" nogil:
    int watch_forks()
    int openmp_version()
    int default_threads()
    int enter_threads(int threads, int explicit_number)
    void leave_threads(int threads)
    int possible_threads(int threads)
    Py_ssize_t share_of_l2(Py_ssize_t share)
    double seconds()
    int run_signal_handlers()
    int report_progress(void* function, Py_ssize_t done, Py_ssize_t total)
    void* aligned_memory(size_t bytes)
    void free_aligned(void* memory)
    char* scratch_memory(size_t bytes, char* local, size_t size)
    void free_scratch(char* memory, const char* local, size_t size)
    int granted

cdef extern from "runtime.h":
    int raise_pending() except -1

cdef extern from "stdint.h" nogil:
    Py_ssize_t PTRDIFF_MAX

cdef extern from "tiles.h" nogil:
    enum: F32, F64, F16, BF16, I8
    enum: SKIP, PARTIAL, FULL
    enum: GROUP_ROWS
    enum: DIRECT_ROWS
    enum: DIRECT_KEYS
    enum: SHORT_DEPTH
    enum: SHORT_KEYS
    enum: DOT
    enum: HAS_DOT
    enum: STRIP, ROW_KEPT, ROW_CHUNK, ROW_IN_TURN, ROW_GAP, TOGETHER

    ctypedef int Flag
    ctypedef Py_ssize_t Count
    void count_more(Count* count, Py_ssize_t n) nogil

    ctypedef struct Array:
        char* data
        int dtype
        Py_ssize_t n_batch
        const Py_ssize_t* shape
        const Py_ssize_t* strides
        Py_ssize_t head, row, col
        const int64_t* starts

    ctypedef struct Batch:
        Py_ssize_t n
        const Py_ssize_t* shape

    ctypedef struct RowWants:
        int any, sums
        double* norm
        void* entropy
        void* max
        void* position
        void* distance
        void* top
        int64_t* top_keys
        Py_ssize_t k
        const void* given

    ctypedef struct KeyWants:
        const double* norm
        const void* given
        const void* row_weights
        const int64_t* order
        Py_ssize_t walk
        void* mass
        void* max
        void* seen
        int64_t* hits
        double threshold
        void* map
        int map_max
        const int64_t* row_bin
        const double* bin_rows
        Py_ssize_t row_bins, key_bins
        const int64_t* slot
        const int64_t* slot_start
        const int64_t* slot_bin
        void* products
        const void* factors
        Py_ssize_t columns
        int odd_factors

    ctypedef struct Seen:
        double* surprise
        double* position
        double* distance
        void* scores
        void* heap
        int* heap_keys
        double* mass
        double* bin
        double* seen
        double* products
        Py_ssize_t row_bin, slots
        double* bins
        unsigned char* odd
        double* merged
        int64_t* hits
        void* largest
        void* part

    ctypedef struct Params:
        Array query, key, value, out, lse, weights, scores
        Array mask, key_mask, bias, q_offset, sinks, slopes, q_segments, k_segments, q_lengths, kv_lengths
        Array q_starts, k_starts, key_scale, value_scale
        Batch batch
        Py_ssize_t batches, q_heads, kv_heads, group, q_len, kv_len, head_dim, value_dim
        int type, causal
        Py_ssize_t left, right
        double scale, softcap, c, unit
        int plain, flip, given_lse, arrays
        Py_ssize_t rows, block_q, block_k, q_blocks, k_blocks, value_stride, depth_stride, split_k, splits
        int whole, shared, direct, strips, copied, brief
        Py_ssize_t group_rows
        Py_ssize_t keep
        Py_ssize_t width, pack_bytes, scratch_bytes, state_bytes
        RowWants row_wants
        KeyWants key_wants
        int n_threads
        Flag stop

    ctypedef struct Range:
        Py_ssize_t start, stop

    ctypedef struct Lengths:
        Py_ssize_t q_length, kv_length, offset

    ctypedef struct Packed:
        void* keys
        void* values
        Py_ssize_t* n_apart
        int* apart

    ctypedef struct Row:
        Py_ssize_t start, stop, position, head

    ctypedef struct Task:
        Py_ssize_t batch, kv_head, first, rows, block_start, block_stop
        Lengths lengths
        Row* row
        const char* query
        const char* key
        const char* value
        const float* key_scale
        const float* value_scale
        char* out
        char* lse
        char* weights
        char* scores
        const char* mask
        const char* key_mask
        const char* bias
        const char* q_segments
        const char* k_segments
        const void** q_rows
        void* q
        void* strips
        void* wide
        void* s
        uint16_t* halves
        void* o
        void* apart_o
        void* row_max
        void* alpha
        void* peaks
        void* block_max
        double* row_sum
        void* final_max
        double* inverse
        Range* kept_part
        void* bias_rows
        unsigned char* allow
        void* line
        Packed packed
        int uses_apart
        Py_ssize_t column, columns
        int choose
        Seen seen

    ctypedef struct Sizes:
        Py_ssize_t most_block_k, least_block_k, block_bytes, direct_block_k, split_k, few_rows
        Py_ssize_t block_q, task_share, keep_share, whole_share, part_rows

    const Sizes SIZES

    ctypedef struct RowOp:
        Array x, out, where, y
        Batch batch
        Py_ssize_t rows, n, columns, strip, lead
        int type, logarithm, stream
        int (*stopped)(void*) noexcept nogil
        void* call

    ctypedef struct Tile:
        int real, panel, lanes, packed
        void (*begin)(const Params*, Task*) noexcept nogil
        void (*pack)(const Params*, Task*, Py_ssize_t, Packed) noexcept nogil
        int (*classify)(const Params*, Task*, Py_ssize_t, Py_ssize_t, Py_ssize_t) noexcept nogil
        void (*scores)(const Params*, Task*, Py_ssize_t, Py_ssize_t, Packed) noexcept nogil
        void (*scores_direct)(const Params*, Task*, Py_ssize_t, Py_ssize_t) noexcept nogil
        void (*finish_scores)(const Params*, Task*, Py_ssize_t, Py_ssize_t) noexcept nogil
        void (*softmax)(const Params*, Task*, Py_ssize_t, Py_ssize_t, Py_ssize_t) noexcept nogil
        void (*values)(const Params*, Task*, Py_ssize_t, Py_ssize_t, Py_ssize_t, Packed) noexcept nogil
        void (*values_direct)(const Params*, Task*, Py_ssize_t, Py_ssize_t) noexcept nogil
        void (*finish)(const Params*, Task*, Py_ssize_t, Py_ssize_t) noexcept nogil
        void (*store_kept)(const Params*, Task*, Py_ssize_t, Py_ssize_t, Py_ssize_t) noexcept nogil
        void (*store_again)(const Params*, Task*, Py_ssize_t, Py_ssize_t, Py_ssize_t) noexcept nogil
        void (*store_under_lse)(const Params*, Task*, Py_ssize_t, Py_ssize_t, Py_ssize_t) noexcept nogil
        void (*store_scores)(const Params*, Task*, Py_ssize_t, Py_ssize_t, Py_ssize_t) noexcept nogil
        void (*save_state)(const Params*, Task*, char*) noexcept nogil
        void (*merge_state)(const Params*, Task*, char*) noexcept nogil
        void (*save_row_stats)(const Params*, Task*, double*) noexcept nogil
        void (*load_row_stats)(const Params*, Task*, double*) noexcept nogil
        void (*load_lse)(const Params*, Task*) noexcept nogil
        void (*weigh)(const Params*, Task*, Py_ssize_t, Py_ssize_t, Py_ssize_t, Packed) noexcept nogil
        void (*softmax_rows)(const RowOp*, Py_ssize_t, Py_ssize_t, void*) noexcept nogil
        void (*softmax_strips)(const RowOp*, Py_ssize_t, Py_ssize_t, void*) noexcept nogil
        void (*softmax_backward_rows)(const RowOp*, Py_ssize_t, Py_ssize_t, void*) noexcept nogil
        void (*begin_seen)(const Params*, Task*) noexcept nogil
        void (*see_scores)(const Params*, Task*, Py_ssize_t, Py_ssize_t, Py_ssize_t) noexcept nogil
        void (*see_weights)(const Params*, Task*, Py_ssize_t, Py_ssize_t, Py_ssize_t) noexcept nogil
        void (*finish_seen)(const Params*, Task*, Py_ssize_t, Py_ssize_t) noexcept nogil
        void (*load_norm)(const Params*, Task*) noexcept nogil
        void (*clear_keys)(const Params*, Task*) noexcept nogil
        void (*receive)(const Params*, Task*, Py_ssize_t, Py_ssize_t, Py_ssize_t) noexcept nogil
        void (*close_bin)(const Params*, Task*, Py_ssize_t) noexcept nogil
        void (*finish_keys)(const Params*, Task*, Py_ssize_t, Py_ssize_t) noexcept nogil
        int (*attend_short)(const Params*, Task*) noexcept nogil
        void (*merge_bins)(const Params*, Task*, const double*, Py_ssize_t, Py_ssize_t, Py_ssize_t) noexcept nogil

    const Tile TILES[3]
    Py_ssize_t batch_offset(const Array*, const Batch*, Py_ssize_t) noexcept
    char* place_of(const Array*, const Batch*, Py_ssize_t, Py_ssize_t) noexcept
    Lengths lengths_of(const Params*, Py_ssize_t) noexcept
    Range visible(const Params*, Lengths, Py_ssize_t) noexcept
    Py_ssize_t least(Py_ssize_t, Py_ssize_t) noexcept
    Py_ssize_t most(Py_ssize_t, Py_ssize_t) noexcept
    Py_ssize_t ceil_div(Py_ssize_t, Py_ssize_t) noexcept
    Py_ssize_t round_up(Py_ssize_t, Py_ssize_t) noexcept
    ctypedef unsigned fp_state
    fp_state fp_enter() noexcept
    void fp_leave(fp_state) noexcept

cdef enum:
    ATTEND, SCORES, WEIGH, WEIGHTS, BACKWARD, RECEIVE # what a call computes
cdef enum:
    ARRAYS = 21
    LSE = 4
    WEIGHTS_ARRAY = 5
    HEAD = 1
    ROW = 2
    COL = 4

cdef int[ARRAYS] AXES = [HEAD | ROW | COL, HEAD | ROW | COL, HEAD | ROW | COL, HEAD | ROW | COL, HEAD | ROW, HEAD | ROW | COL,
                     HEAD | ROW | COL, HEAD | ROW | COL, COL, HEAD | ROW | COL, 0, HEAD, HEAD, ROW, COL, 0, 0, 0, 0, HEAD | ROW,
                     HEAD | ROW]
cdef int[ARRAYS] OUTPUT = [0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]   # lse and weights: as the mode is


cdef struct Work:
    Params p
    const Tile* tile
    int mode
    size_t bytes                   # of `memory`, whose parts follow
    char* memory
    char* packed                   # a round's keys and values, if shared
    char* states                   # a round's states of few rows, if their keys are split
    double* stats                  # row maxima and sums for the second pass of the weights
    char* scratch                  # p.scratch_bytes for each thread
    Py_ssize_t first_head          # of this round
    Py_ssize_t heads               # kv heads of a round
    Py_ssize_t first_split
    Py_ssize_t round_splits
    double next_poll
    bint uniform                   # the path of many rows, whatever their number: statistics of a row have one value
    double* bins                   # a round's parts of maps
    Py_ssize_t chunk, chunks       # blocks of a chunk of keys, and chunks
    void* progress                 # a Python function of (done, total), or NULL
    Py_ssize_t total               # tasks,
    Count done                     # and those that are behind us

