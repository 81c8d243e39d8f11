package engine

import (
	"errors"
	"fmt"
	"iter"
	"math"
	"slices"
	"time"
)

// A Config says how large and how fast an engine is. Every zero field has a default.
type Config struct {
	BlockSize        int           // tokens in a KV block; 16
	Blocks           int           // KV blocks; 3000
	MaxSeqs          int           // most sequences that run at once; 256
	MaxBatchedTokens int           // token budget of a step, not less than MaxSeqs; 2048, or MaxSeqs if that is more
	Cost             Cost          // how long a step takes; DefaultCost
	AdmitWhole       bool          // admit a sequence only if its whole prompt fits now, not just its first chunk
	AbortLag         time.Duration // from Abort to the instant after which the next step boundary ends the sequence; 0
	AbortMode        AbortMode

	// Used by Server only.
	Model        string    // name of the model; "engine"
	AnswerTokens int       // length of an answer for which the client sets no limit; 128
	OnEnd        func(End) // called once for each request that was accepted; see End
}

// An AbortMode says what an abort does.
type AbortMode int

const (
	AbortAll       AbortMode = iota // it ends the sequence and frees its blocks and its slot
	AbortStreaming                  // as AbortAll if the answer is streamed; else nothing
	AbortLeak                       // it ends the sequence, but what it held never comes back
	AbortNever                      // nothing
)

// A Cost is what a step takes: a constant, and more for each token and each KV token held.
type Cost struct{ Step, Prefill, Decode, KV time.Duration }

// DefaultCost is an 8B model on one H100, by order of magnitude.
var DefaultCost = Cost{
	Step:    6 * time.Millisecond,
	Prefill: 25 * time.Microsecond,
	Decode:  30 * time.Microsecond,
	KV:      40 * time.Nanosecond,
}

// Scale returns a cost f times as high.
func (c Cost) Scale(f float64) Cost {
	by := func(d time.Duration) time.Duration { return time.Duration(float64(d) * f) }
	return Cost{by(c.Step), by(c.Prefill), by(c.Decode), by(c.KV)}
}

func (c Cost) of(prefill, decodes, kv int) time.Duration {
	return c.Step + time.Duration(prefill)*c.Prefill + time.Duration(decodes)*c.Decode + time.Duration(kv)*c.KV
}

// withDefaults fills in the zero fields and panics if the rest makes no sense.
func (c Config) withDefaults() Config {
	set := func(name string, v *int, d int) {
		if *v < 0 || *v > math.MaxInt32 {
			panic(fmt.Sprintf("engine: %s is %d", name, *v))
		}
		if *v == 0 {
			*v = d
		}
	}
	set("BlockSize", &c.BlockSize, 16)
	set("Blocks", &c.Blocks, 3000)
	set("MaxSeqs", &c.MaxSeqs, 256)
	set("MaxBatchedTokens", &c.MaxBatchedTokens, max(2048, c.MaxSeqs))
	set("AnswerTokens", &c.AnswerTokens, 128)
	if c.Cost == (Cost{}) {
		c.Cost = DefaultCost
	}
	if c.Model == "" {
		c.Model = "engine"
	}
	switch {
	case c.MaxBatchedTokens < c.MaxSeqs:
		panic("engine: MaxBatchedTokens below MaxSeqs")
	case c.Cost.Step <= 0 || min(c.Cost.Prefill, c.Cost.Decode, c.Cost.KV) < 0:
		panic("engine: a step must take time")
	case c.AbortLag < 0:
		panic("engine: negative AbortLag")
	case c.AbortMode < AbortAll || c.AbortMode > AbortNever:
		panic("engine: unknown AbortMode")
	}
	return c
}

// A Request is what a sequence is asked to do.
type Request struct {
	Prompt int  // tokens, at least 1
	Output int  // tokens to generate, at least 1
	Stream bool // the answer is streamed; matters to AbortStreaming only

	// Hashes name the prompt's full blocks, in order, for those who share prefixes: a hash stands for all tokens from
	// the start of the prompt to the end of its block. May be nil or cover less than the prompt; what goes beyond it is
	// ignored. The Core keeps the slice.
	Hashes []uint64

	Tag any // the caller's own
}

// ErrTooLarge is returned by Add for a request that the whole pool could not hold.
var ErrTooLarge = errors.New("engine: request larger than the KV cache")

// State is where a sequence is in its life.
type State int8

const (
	Waiting  State = iota // in the queue, also after a preemption
	Running               // in the batch
	Finished              // ended by itself, all tokens delivered
	Aborted               // ended by Abort or Reset
)

// A Sequence is a request inside a Core. The Core writes its fields, and only inside its methods; everyone else reads.
type Sequence struct {
	Request
	State       State
	Computed    int // tokens whose KV is there, shared ones included: the progress of its prefill
	Generated   int // tokens delivered
	Preemptions int

	Added      time.Duration
	Admitted   time.Duration // left the queue for the first time; -1 before
	FirstToken time.Duration // -1 before
	Ended      time.Duration // -1 before

	blocks   []int32
	planned  int // tokens of this sequence in the step in flight
	aborting bool
}

// Blocks returns how many blocks the sequence holds; blocks that are shared count for each holder. Those of a leaked one
// stay.
func (s *Sequence) Blocks() int { return len(s.blocks) }

// missing returns how many tokens must be computed until the next one is generated.
func (s *Sequence) missing() int { return s.Prompt + s.Generated - s.Computed }

func (s *Sequence) decodes() bool { return s.Generated > 0 && s.missing() == 1 }

// A Step is what happened at a step boundary, and the step that began there.
type Step struct {
	// Next is when to call Step again: the end of the step in flight, or the due time of an abort if nothing can run.
	// Idle means that there is neither, so that nothing will happen before Add or Abort.
	Next time.Duration
	Idle bool

	// The step in flight computes Prefill tokens of prompts (or of what a preemption lost) and one token for each of
	// Decodes.
	Prefill, Decodes int

	// What happened at this boundary. The slices are the Core's, valid until its next Step. Of one sequence
	// that got its last token, both Tokens and Ended tell.
	Tokens    []*Sequence // got a token from the step that ended
	Ended     []*Sequence // are Finished or Aborted now
	Preempted []*Sequence // went back to the queue
}

// Stats is a Core's usage now and its counters since New.
type Stats struct {
	BlocksUsed, BlocksTotal, BlockSize int
	Running                            int // sequences in the batch; leaked ones count, they keep their slots
	Waiting                            int
	Leaked                             int
	Preemptions                        int64
	PromptTokens                       int64 // of sequences that have got their first token, counted once
	GenerationTokens                   int64
	Finished, Aborted                  int64
}

// KVUsage returns the used part of the pool, from 0 to 1.
func (s Stats) KVUsage() float64 { return float64(s.BlocksUsed) / float64(s.BlocksTotal) }

// A Core is the scheduler and the KV cache of one engine. Make it with New. It is for one goroutine at a time. Times are
// durations since a start of the caller's choice and must not decrease from one call to the next; the same calls give
// the same results.
//
// The owner calls Step at the instant that the last one called Next, and after an Add or Abort while the Core is idle;
// it may call it after every Add and Abort, since a step in flight is not disturbed.
type Core struct {
	cfg     Config
	pool    pool
	waiting []*Sequence // in order of Add, those preempted before all others
	running []*Sequence // in order of admission; only the last one can be in the middle of its prefill
	leaked  []*Sequence
	aborts  []abort // in order of due time, which is that of Abort since the lag is constant
	stats   Stats   // the counters only

	busy bool // a step is in flight, until end
	end  time.Duration
	step Step // buffers of the last result
}

type abort struct {
	seq *Sequence
	due time.Duration
}

// New returns an empty Core. It panics if c makes no sense.
func New(c Config) *Core {
	c = c.withDefaults()
	return &Core{cfg: c, pool: newPool(c.Blocks)}
}

// Capacity returns the most tokens a request may have: prompt and output, less the last token, whose KV is never stored.
func (c *Core) Capacity() int { return c.cfg.Blocks * c.cfg.BlockSize }

// Add puts a request at the end of the queue. It fails with ErrTooLarge, or if there is nothing to do.
func (c *Core) Add(now time.Duration, r Request) (*Sequence, error) {
	if r.Prompt < 1 || r.Output < 1 {
		return nil, errors.New("engine: a request needs a prompt and an output")
	}
	if r.Prompt > c.Capacity() || r.Output > c.Capacity()-r.Prompt+1 {
		return nil, ErrTooLarge
	}
	r.Hashes = r.Hashes[:min(len(r.Hashes), r.Prompt/c.cfg.BlockSize)]
	s := &Sequence{Request: r, Added: now, Admitted: -1, FirstToken: -1, Ended: -1}
	s.blocks = make([]int32, 0, c.blocksFor(r.Prompt+r.Output-1)) // all it can need: Step won't have to grow it
	c.waiting = append(c.waiting, s)
	return s, nil
}

// Abort asks for the end of s, which comes with the first step boundary at or after now plus AbortLag, unless s finishes
// before that or with it. It reports whether there is anything to come of it: false if s has ended or was aborted
// before, or the mode ignores it.
func (c *Core) Abort(now time.Duration, s *Sequence) bool {
	switch {
	case s.aborting || s.State >= Finished:
		return false
	case c.cfg.AbortMode == AbortNever, c.cfg.AbortMode == AbortStreaming && !s.Stream:
		return false
	}
	s.aborting = true
	c.aborts = append(c.aborts, abort{s, now + c.cfg.AbortLag})
	return true
}

// Step is the boundary between two steps: it ends the one in flight, ends the sequences whose abort is due, and begins
// the next one. While the step in flight isn't over it only says when that will be.
func (c *Core) Step(now time.Duration) Step {
	r := &c.step
	r.Tokens, r.Ended, r.Preempted = r.Tokens[:0], r.Ended[:0], r.Preempted[:0]
	if c.busy && now < c.end {
		return *r
	}
	if c.busy {
		c.finish(now)
	}
	c.abortDue(now)
	r.Prefill, r.Decodes = c.schedule(now)
	c.busy, r.Idle = r.Prefill+r.Decodes > 0, false
	switch {
	case c.busy:
		c.end = now + c.cfg.Cost.of(r.Prefill, r.Decodes, c.pool.used()*c.cfg.BlockSize)
		r.Next = c.end
	case len(c.aborts) > 0:
		r.Next = c.aborts[0].due
	default:
		r.Idle, r.Next = true, 0
	}
	return *r
}

// Reset ends everything at once, as Aborted, and returns it: a restart of the engine. Leaked blocks come back and
// prefixes are forgotten; counters go on.
func (c *Core) Reset(now time.Duration) []*Sequence {
	all := slices.Collect(c.All())
	for _, s := range all {
		c.close(s, Aborted, now)
	}
	for _, s := range slices.Concat(all, c.leaked) {
		s.blocks = nil
	}
	c.pool = newPool(c.cfg.Blocks)
	c.waiting, c.running, c.leaked, c.aborts, c.busy, c.step = nil, nil, nil, nil, false, Step{}
	return all
}

// All iterates over the sequences that have not ended: the batch in order of admission, then the queue.
func (c *Core) All() iter.Seq[*Sequence] {
	return func(yield func(*Sequence) bool) {
		for _, l := range [][]*Sequence{c.running, c.waiting} {
			for _, s := range l {
				if !yield(s) {
					return
				}
			}
		}
	}
}

// Stats returns the usage during the step in flight, and the counters.
func (c *Core) Stats() Stats {
	s := c.stats
	s.BlocksUsed, s.BlocksTotal, s.BlockSize = c.pool.used(), c.pool.total(), c.cfg.BlockSize
	s.Running, s.Waiting, s.Leaked = len(c.running)+len(c.leaked), len(c.waiting), len(c.leaked)
	return s
}

func (c *Core) blocksFor(tokens int) int { return (tokens + c.cfg.BlockSize - 1) / c.cfg.BlockSize }

// finish books what the step in flight has computed.
func (c *Core) finish(now time.Duration) {
	kept := c.running[:0]
	for _, s := range c.running {
		if s.planned > 0 {
			c.book(s, now)
		}
		if s.State == Running {
			kept = append(kept, s)
		}
	}
	clear(c.running[len(kept):])
	c.running = kept
}

func (c *Core) book(s *Sequence, now time.Duration) {
	full := s.Computed / c.cfg.BlockSize
	s.Computed += s.planned
	s.planned = 0
	for i := full; i < min(len(s.Hashes), s.Computed/c.cfg.BlockSize); i++ {
		c.pool.name(s.blocks[i], s.Hashes[i])
	}
	if s.missing() > 0 {
		return
	}
	if s.Generated == 0 {
		s.FirstToken = now
		c.stats.PromptTokens += int64(s.Prompt)
	}
	s.Generated++
	c.stats.GenerationTokens++
	c.step.Tokens = append(c.step.Tokens, s)
	if s.Generated == s.Output {
		c.release(s)
		c.close(s, Finished, now)
		c.step.Ended = append(c.step.Ended, s)
	}
}

// close notes the end of a sequence; its blocks and its place in the lists are up to the caller.
func (c *Core) close(s *Sequence, as State, now time.Duration) {
	s.State, s.Ended = as, now
	if as == Finished {
		c.stats.Finished++
	} else {
		c.stats.Aborted++
	}
}

// release gives a sequence's blocks back, the last one first, so that of a shareable prefix the start survives longest.
func (c *Core) release(s *Sequence) {
	for _, b := range slices.Backward(s.blocks) {
		c.pool.drop(b)
	}
	s.blocks = s.blocks[:0]
}

func (c *Core) abortDue(now time.Duration) {
	n := 0
	for ; n < len(c.aborts); n++ {
		s := c.aborts[n].seq
		if s.State >= Finished { // was quicker
			continue
		}
		if c.aborts[n].due > now {
			break
		}
		switch {
		case s.State == Waiting: // holds nothing
			c.waiting = remove(c.waiting, s)
		case c.cfg.AbortMode == AbortLeak:
			c.running = remove(c.running, s)
			c.leaked = append(c.leaked, s)
		default:
			c.running = remove(c.running, s)
			c.release(s)
		}
		c.close(s, Aborted, now)
		c.step.Ended = append(c.step.Ended, s)
	}
	c.aborts = slices.Delete(c.aborts, 0, n)
}

func remove(l []*Sequence, s *Sequence) []*Sequence {
	i := slices.Index(l, s)
	return slices.Delete(l, i, i+1)
}

// schedule plans a step: decodes first, then the prefill that is under way, then the queue.
func (c *Core) schedule(now time.Duration) (prefill, decodes int) {
	// The budget is at least MaxSeqs, so it is enough for all decodes.
	for i := 0; i < len(c.running); i++ {
		s := c.running[i]
		if !s.decodes() {
			continue
		}
		// Whoever is preempted stands behind s, hence has no tokens in this plan yet; or it is s itself.
		for s.State == Running && !c.grow(s, 1) {
			c.preemptLast()
		}
		if s.State == Running {
			s.planned = 1
			decodes++
		}
	}

	budget := c.cfg.MaxBatchedTokens - decodes
	open := len(c.step.Preempted) == 0
	if n := len(c.running); n > 0 && !c.running[n-1].decodes() {
		s := c.running[n-1]
		if chunk := min(s.missing(), budget); c.grow(s, chunk) {
			s.planned = chunk
			prefill += chunk
		} else {
			open = false // nobody from the queue gets the blocks it waits for
		}
	}

	admitted := 0
	for open && prefill < budget && admitted < len(c.waiting) && len(c.running)+len(c.leaked) < c.cfg.MaxSeqs {
		s := c.waiting[admitted]
		chunk := c.admit(s, budget-prefill)
		if chunk == 0 {
			break
		}
		if s.Admitted < 0 {
			s.Admitted = now
		}
		s.State, s.planned = Running, chunk
		prefill += chunk
		c.running = append(c.running, s)
		admitted++
	}
	c.waiting = slices.Delete(c.waiting, 0, admitted)
	return prefill, decodes
}

// grow gives s the blocks for n more tokens, or reports that there are too few.
func (c *Core) grow(s *Sequence, n int) bool {
	need := c.blocksFor(s.Computed+n) - len(s.blocks)
	if need > c.pool.free {
		return false
	}
	for range need {
		s.blocks = append(s.blocks, c.pool.take())
	}
	return true
}

// admit gives a waiting sequence the blocks of the prefix it can share and those for its first chunk of at most budget
// tokens, and returns the size of that chunk; 0 if there are too few blocks.
func (c *Core) admit(s *Sequence, budget int) int {
	// At least one token is computed in any case: the next one comes of it.
	most := min(len(s.Hashes), (s.missing()-1)/c.cfg.BlockSize)
	shared, free := 0, 0 // blocks that can be shared, those of them that nobody holds
	for ; shared < most; shared++ {
		b, ok := c.pool.index[s.Hashes[shared]]
		if !ok {
			break
		}
		if c.pool.blocks[b].refs == 0 {
			free++
		}
	}
	computed := shared * c.cfg.BlockSize
	chunk := min(s.missing()-computed, budget)
	fit := computed + chunk
	if c.cfg.AdmitWhole {
		fit = s.missing()
	}
	if c.blocksFor(fit)-shared+free > c.pool.free {
		return 0
	}
	for _, h := range s.Hashes[:shared] {
		b := c.pool.index[h]
		c.pool.share(b)
		s.blocks = append(s.blocks, b)
	}
	s.Computed = computed
	c.grow(s, chunk)
	return chunk
}

// preemptLast sends the sequence admitted last back to the head of the queue. What it had computed is lost, unless it
// can be shared.
func (c *Core) preemptLast() {
	n := len(c.running) - 1
	s := c.running[n]
	c.running[n] = nil
	c.running = c.running[:n]
	c.release(s)
	s.State, s.Computed = Waiting, 0
	s.Preemptions++
	c.stats.Preemptions++
	c.waiting = slices.Insert(c.waiting, 0, s)
	c.step.Preempted = append(c.step.Preempted, s)
}
