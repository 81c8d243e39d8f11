package engine_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/extevict/extevict/internal/engine"
)

const ms = time.Millisecond

// simple costs make times easy to foretell: every step takes one millisecond.
var simple = engine.Cost{Step: ms}

func add(t testing.TB, c *engine.Core, now time.Duration, r engine.Request) *engine.Sequence {
	t.Helper()
	s, err := c.Add(now, r)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// drain steps until the core is idle, calls each after every step, and returns the time.
func drain(t testing.TB, c *engine.Core, now time.Duration, each func(now time.Duration, s engine.Step)) time.Duration {
	t.Helper()
	for range 100_000 {
		s := c.Step(now)
		if err := c.Check(); err != nil {
			t.Fatalf("at %v: %v", now, err)
		}
		if each != nil {
			each(now, s)
		}
		if s.Idle {
			return now
		}
		if s.Next <= now {
			t.Fatalf("at %v: next step at %v", now, s.Next)
		}
		now = s.Next
	}
	t.Fatal("never idle")
	return 0
}

func TestCost(t *testing.T) {
	c := engine.New(engine.Config{})
	a := add(t, c, 0, engine.Request{Prompt: 100, Output: 3})
	b := add(t, c, 0, engine.Request{Prompt: 3000, Output: 1})
	type row struct {
		At                     time.Duration
		Prefill, Decodes, Used int
		Tokens, Ended          int
	}
	var got []row
	drain(t, c, 0, func(now time.Duration, s engine.Step) {
		got = append(got, row{now, s.Prefill, s.Decodes, c.Stats().BlocksUsed, len(s.Tokens), len(s.Ended)})
	})
	// 6 ms + 25 us a prompt token + 30 us a decode + 40 ns a KV token held during the step.
	first := 6*ms + 2048*25*time.Microsecond + (7+122)*16*40
	second := first + 6*ms + 1052*25*time.Microsecond + 30*time.Microsecond + (7+188)*16*40
	third := second + 6*ms + 30*time.Microsecond + 7*16*40
	want := []row{
		{0, 2048, 0, 129, 0, 0},
		{first, 1052, 1, 195, 1, 0},
		{second, 0, 1, 7, 2, 1},
		{third, 0, 0, 0, 1, 1},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("steps (-want +got):\n%s", d)
	}
	type times struct{ Admitted, FirstToken, Ended time.Duration }
	for _, x := range []struct {
		s    *engine.Sequence
		want times
	}{{a, times{0, first, third}}, {b, times{0, second, second}}} {
		if d := cmp.Diff(x.want, times{x.s.Admitted, x.s.FirstToken, x.s.Ended}); d != "" {
			t.Errorf("times (-want +got):\n%s", d)
		}
	}
	if got, want := engine.DefaultCost.Scale(0.5), (engine.Cost{Step: 3 * ms, Prefill: 12500, Decode: 15000, KV: 20}); got != want {
		t.Errorf("half of the default cost is %v, want %v", got, want)
	}
}

func TestStepInFlightIsNotDisturbed(t *testing.T) {
	c := engine.New(engine.Config{Cost: simple})
	add(t, c, 0, engine.Request{Prompt: 10, Output: 2})
	c.Step(0)
	b := add(t, c, ms/2, engine.Request{Prompt: 10, Output: 1})
	if s := c.Step(ms / 2); s.Next != ms || s.Idle || s.Prefill != 10 || b.State != engine.Waiting {
		t.Errorf("half way: %+v, state %d", s, b.State)
	}
	if s := c.Step(ms); s.Next != 2*ms || len(s.Tokens) != 1 || s.Prefill != 10 || s.Decodes != 1 {
		t.Errorf("at the end: %+v", s)
	}
}

func TestPreemption(t *testing.T) {
	// Two of 32+33 tokens (4 blocks each) in 6 blocks; a third waits behind them.
	c := engine.New(engine.Config{Blocks: 6, Cost: simple})
	r := engine.Request{Prompt: 32, Output: 33}
	a, b := add(t, c, 0, r), add(t, c, 0, r)
	third := add(t, c, 0, engine.Request{Prompt: 96, Output: 1})
	var log []string
	drain(t, c, 0, func(now time.Duration, s engine.Step) {
		for _, q := range s.Preempted {
			log = append(log, fmt.Sprintf("%v preempted b=%t at %d tokens", now, q == b, q.Generated))
		}
		for _, q := range s.Ended {
			log = append(log, fmt.Sprintf("%v ended a=%t b=%t third=%t", now, q == a, q == b, q == third))
		}
	})
	// Both take their third block with their second token, and would take a fourth with their 18th: a preempts b, which comes
	// back when a is done, computes 32+17 tokens in one step, and generates 16 more.
	want := []string{
		"17ms preempted b=true at 17 tokens",
		"33ms ended a=true b=false third=false",
		"49ms ended a=false b=true third=false",
		"50ms ended a=false b=false third=true",
	}
	if d := cmp.Diff(want, log); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	if got := c.Stats(); got.Preemptions != 1 || got.PromptTokens != 160 || got.GenerationTokens != 67 || got.Finished != 3 {
		t.Errorf("stats: %+v", got)
	}
}

func TestNobodyOvertakesAWaitingPrefill(t *testing.T) {
	// a's prefill needs more blocks than b has left; the small c must not take them.
	c := engine.New(engine.Config{Blocks: 10, MaxSeqs: 4, MaxBatchedTokens: 64, Cost: simple})
	b := add(t, c, 0, engine.Request{Prompt: 60, Output: 36}) // 4 to 6 blocks
	a := add(t, c, 0, engine.Request{Prompt: 128, Output: 1}) // 8 blocks
	small := add(t, c, 0, engine.Request{Prompt: 10, Output: 1})
	drain(t, c, 0, nil)
	if !(b.Ended < a.Ended && a.Ended <= small.Ended && a.Admitted < b.Ended && small.Admitted >= b.Ended) {
		t.Errorf("ended at %v %v %v, admitted at %v %v %v", b.Ended, a.Ended, small.Ended, b.Admitted, a.Admitted, small.Admitted)
	}
}

func TestAdmitWhole(t *testing.T) {
	for whole, want := range map[bool]time.Duration{false: ms, true: 3 * ms} {
		c := engine.New(engine.Config{Blocks: 12, MaxSeqs: 2, MaxBatchedTokens: 80, Cost: simple, AdmitWhole: whole})
		add(t, c, 0, engine.Request{Prompt: 80, Output: 3})
		b := add(t, c, 0, engine.Request{Prompt: 120, Output: 1})
		drain(t, c, 0, nil)
		if b.Admitted != want {
			t.Errorf("whole %t: admitted at %v, want %v", whole, b.Admitted, want)
		}
	}
}

func TestSharedPrefix(t *testing.T) {
	c := engine.New(engine.Config{Blocks: 10, Cost: simple})
	hashes := []uint64{1, 2, 3}
	type row struct{ Prefill, Used int }
	var got []row
	var now time.Duration
	run := func(r engine.Request) *engine.Sequence {
		s := add(t, c, now, r)
		x := c.Step(now)
		got = append(got, row{x.Prefill, c.Stats().BlocksUsed})
		now = x.Next
		return s
	}
	run(engine.Request{Prompt: 60, Output: 100, Hashes: hashes})          // 4 blocks, 3 of them named
	run(engine.Request{Prompt: 60, Output: 1, Hashes: hashes})            // shares 3, takes 1 and computes 12; beside it one decode
	s := run(engine.Request{Prompt: 48, Output: 1, Hashes: hashes})       // the last token is always computed: shares 2 only
	run(engine.Request{Prompt: 40, Output: 1, Hashes: []uint64{1, 9, 3}}) // shares as far as the prefix goes
	want := []row{{60, 4}, {12, 5}, {16, 5}, {24, 6}}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	if now = drain(t, c, now, nil); s.Computed != 48 || c.Stats().BlocksUsed != 0 {
		t.Errorf("computed %d, used %d", s.Computed, c.Stats().BlocksUsed)
	}
	// Nobody holds them, yet blocks 1 to 3 are still there, and go last, 3 before 2 before 1.
	got = nil
	for _, r := range []engine.Request{
		{Prompt: 16, Output: 1},
		{Prompt: 60, Output: 1, Hashes: hashes}, // all three
		{Prompt: 128, Output: 1},
		{Prompt: 60, Output: 1, Hashes: hashes}, // two
		{Prompt: 160, Output: 1},
		{Prompt: 60, Output: 1, Hashes: hashes},                    // none
		{Prompt: 20, Output: 30, Hashes: []uint64{7, 8, 9}},        // names its first block only: the others hold what it generated
		{Prompt: 60, Output: 1, Hashes: []uint64{7, 8, 9}},         // one
		{Prompt: 60, Output: 1, Hashes: []uint64{7, 8, 9, 10, 11}}, // three
	} {
		run(r)
		now = drain(t, c, now, nil)
	}
	want = []row{{16, 1}, {12, 4}, {128, 8}, {28, 4}, {160, 10}, {60, 4}, {20, 2}, {44, 4}, {12, 4}}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

func TestAbortModes(t *testing.T) {
	type after struct {
		Accepted     bool
		State        engine.State
		Used, Active int
	}
	freed, runs := after{true, engine.Aborted, 0, 0}, after{false, engine.Running, 7, 1}
	for _, x := range []struct {
		name          string
		mode          engine.AbortMode
		stream, whole after
	}{
		{"all", engine.AbortAll, freed, freed},
		{"streaming", engine.AbortStreaming, freed, runs},
		{"leak", engine.AbortLeak, after{true, engine.Aborted, 7, 1}, after{true, engine.Aborted, 7, 1}},
		{"never", engine.AbortNever, runs, runs},
	} {
		for _, stream := range []bool{true, false} {
			c := engine.New(engine.Config{Cost: simple, AbortLag: 5 * ms / 2, AbortMode: x.mode})
			s := add(t, c, 0, engine.Request{Prompt: 100, Output: 20, Stream: stream})
			next := c.Step(0).Next
			accepted := c.Abort(ms/10, s)
			if accepted && c.Abort(ms/10, s) {
				t.Errorf("%s: aborted twice", x.name)
			}
			for range 2 { // due at 2.6 ms: boundaries at 1 and 2 do nothing
				if next = c.Step(next).Next; s.State != engine.Running {
					t.Errorf("%s: ended early", x.name)
				}
			}
			step := c.Step(next)
			got := after{accepted, s.State, c.Stats().BlocksUsed, c.Stats().Running}
			want := x.whole
			if stream {
				want = x.stream
			}
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("%s, stream %t (-want +got):\n%s", x.name, stream, d)
			}
			if ended := slices.Contains(step.Ended, s); ended != want.Accepted {
				t.Errorf("%s: reported as ended: %t", x.name, ended)
			}
			if c.Abort(next, s) && x.mode != engine.AbortNever {
				t.Errorf("%s: aborted after the end", x.name)
			}
		}
	}
}

func TestAbortWhileNothingRuns(t *testing.T) {
	// Leaks fill both slots; what waits can't run, but it can be aborted, at the due time.
	c := engine.New(engine.Config{MaxSeqs: 2, Cost: simple, AbortLag: 5 * ms, AbortMode: engine.AbortLeak})
	for range 2 {
		c.Abort(0, add(t, c, 0, engine.Request{Prompt: 10, Output: 100}))
	}
	now := drain(t, c, 0, nil)
	s := add(t, c, now, engine.Request{Prompt: 10, Output: 100})
	if got := c.Step(now); !got.Idle || s.State != engine.Waiting || c.Stats().Leaked != 2 {
		t.Fatalf("a slot came back: %+v, %+v", got, c.Stats())
	}
	c.Abort(now, s)
	if got := c.Step(now); got.Idle || got.Next != now+5*ms {
		t.Errorf("with an abort due at %v: %+v", now+5*ms, got)
	}
	if got := c.Step(now + 5*ms); !got.Idle || s.State != engine.Aborted || s.Ended != now+5*ms {
		t.Errorf("after it: %+v, %+v", got, s)
	}
	s = add(t, c, now+5*ms, engine.Request{Prompt: 10, Output: 1})
	if ended := c.Reset(now + 6*ms); !slices.Equal(ended, []*engine.Sequence{s}) || s.State != engine.Aborted {
		t.Errorf("reset ended %v", ended)
	}
	if err := c.Check(); err != nil {
		t.Error(err)
	}
	add(t, c, now+6*ms, engine.Request{Prompt: 10, Output: 1})
	c.Step(now + 6*ms)
	if c.Reset(now + 6*ms); c.Check() != nil || c.Stats().Aborted != 5 || c.Stats().BlocksUsed != 0 {
		t.Errorf("reset in the middle of a step: %v, %+v", c.Check(), c.Stats())
	}
	s = add(t, c, now+6*ms, engine.Request{Prompt: 10, Output: 1})
	if drain(t, c, now+6*ms, nil); s.State != engine.Finished || c.Stats().Leaked != 0 {
		t.Errorf("after the reset: %+v", s)
	}
}

func TestAddRefuses(t *testing.T) {
	c := engine.New(engine.Config{Blocks: 4})
	for _, x := range []struct {
		prompt, output  int
		large, accepted bool
	}{
		{64, 1, false, true},
		{63, 2, false, true},
		{1, 64, false, true},
		{65, 1, true, false},
		{64, 2, true, false},
		{math.MaxInt, 1, true, false},
		{1, math.MaxInt, true, false},
		{math.MaxInt, math.MaxInt, true, false},
		{0, 1, false, false},
		{1, 0, false, false},
		{-1, 1, false, false},
		{1, math.MinInt, false, false},
	} {
		_, err := c.Add(0, engine.Request{Prompt: x.prompt, Output: x.output})
		if (err == nil) != x.accepted || errors.Is(err, engine.ErrTooLarge) != x.large {
			t.Errorf("prompt %d, output %d: %v", x.prompt, x.output, err)
		}
	}
	drain(t, c, 0, nil)
	if got := c.Stats(); got.Finished != 3 {
		t.Errorf("stats: %+v", got)
	}
}

func TestNewPanics(t *testing.T) {
	for name, c := range map[string]engine.Config{
		"blocks":     {Blocks: -1},
		"block size": {BlockSize: -1},
		"budget":     {MaxBatchedTokens: 8, MaxSeqs: 9},
		"cost":       {Cost: engine.Cost{Decode: ms}},
		"negative":   {Cost: engine.Cost{Step: ms, KV: -1}},
		"lag":        {AbortLag: -1},
		"mode":       {AbortMode: 4},
	} {
		func() {
			defer func() {
				if r, ok := recover().(string); !ok || !strings.HasPrefix(r, "engine: ") {
					t.Errorf("%s: recovered %v", name, r)
				}
			}()
			engine.New(c)
		}()
	}
}

// A run drives a core with random work and checks all that can be seen from outside.
type run struct {
	t     *testing.T
	rng   *rand.Rand
	cfg   engine.Config
	core  *engine.Core
	now   time.Duration
	next  time.Duration // end of the step in flight; 0 if there is none
	added []*engine.Sequence
	due   map[*engine.Sequence]time.Duration
	ended map[*engine.Sequence]bool
	got   map[*engine.Sequence]int // tokens
	log   strings.Builder
}

func newRun(t *testing.T, seed uint64) *run {
	r := &run{
		t: t, rng: rand.New(rand.NewPCG(seed, 0)),
		due: map[*engine.Sequence]time.Duration{}, ended: map[*engine.Sequence]bool{}, got: map[*engine.Sequence]int{},
	}
	r.cfg = engine.Config{
		BlockSize: 1 + r.rng.IntN(20), Blocks: 5 + r.rng.IntN(60), MaxSeqs: 1 + r.rng.IntN(12), MaxBatchedTokens: 12 + r.rng.IntN(100),
		AbortLag: time.Duration(r.rng.IntN(3)) * 7 * ms, AbortMode: engine.AbortMode(r.rng.IntN(4)), AdmitWhole: r.rng.IntN(2) == 0,
	}
	r.core = engine.New(r.cfg)
	return r
}

func (r *run) fatal(format string, args ...any) {
	r.t.Helper()
	r.t.Fatalf("%+v at %v: %s", r.cfg, r.now, fmt.Sprintf(format, args...))
}

func (r *run) add() {
	most := r.core.Capacity()
	q := engine.Request{Prompt: 1 + r.rng.IntN(most), Stream: r.rng.IntN(2) == 0, Tag: len(r.added)}
	q.Output = 1 + r.rng.IntN(min(50, most-q.Prompt+1))
	if r.rng.IntN(3) > 0 {
		family := 1000 * uint64(r.rng.IntN(3))
		for i := range r.rng.IntN(12) {
			q.Hashes = append(q.Hashes, family+uint64(i))
		}
	}
	s, err := r.core.Add(r.now, q)
	if err != nil {
		r.fatal("%v", err)
	}
	r.added = append(r.added, s)
}

func (r *run) abort() {
	if len(r.added) == 0 {
		return
	}
	s := r.added[r.rng.IntN(len(r.added))]
	_, twice := r.due[s]
	deaf := r.cfg.AbortMode == engine.AbortNever || r.cfg.AbortMode == engine.AbortStreaming && !s.Stream
	if got, want := r.core.Abort(r.now, s), !twice && !deaf && !r.ended[s]; got != want {
		r.fatal("abort: %t, want %t", got, want)
	} else if got {
		r.due[s] = r.now + r.cfg.AbortLag
	}
}

// step calls Step now, which may be before the end of the step in flight.
func (r *run) step() (idle bool) {
	boundary := r.now >= r.next
	before := r.core.Stats()
	s := r.core.Step(r.now)
	if err := r.core.Check(); err != nil {
		r.fatal("%v", err)
	}
	if !boundary {
		if s.Next != r.next || len(s.Tokens)+len(s.Ended)+len(s.Preempted) > 0 || r.core.Stats() != before {
			r.fatal("disturbed: %+v", s)
		}
		return false
	}
	r.next = s.Next
	if s.Prefill+s.Decodes == 0 {
		r.next = 0
	}
	fmt.Fprintf(&r.log, "%v next %v, %d+%d of %d blocks:", r.now, s.Next, s.Prefill, s.Decodes, r.core.Stats().BlocksUsed)
	for i, l := range [][]*engine.Sequence{s.Tokens, s.Ended, s.Preempted} {
		for _, q := range l {
			fmt.Fprintf(&r.log, " %c%d", "tep"[i], q.Tag)
		}
	}
	r.log.WriteByte('\n')

	for _, q := range s.Tokens {
		r.got[q]++
	}
	for _, q := range s.Ended {
		due, aborted := r.due[q]
		switch {
		case r.ended[q]:
			r.fatal("%d ended twice", q.Tag)
		case q.Ended != r.now || r.got[q] != q.Generated:
			r.fatal("%d: %d tokens seen, %+v", q.Tag, r.got[q], q)
		case q.State == engine.Finished && q.Generated != q.Output:
			r.fatal("%d finished with %d of %d tokens", q.Tag, q.Generated, q.Output)
		case q.State == engine.Aborted && (!aborted || due > r.now):
			r.fatal("%d aborted, due at %v", q.Tag, due)
		}
		r.ended[q] = true
	}
	for _, q := range s.Preempted {
		if q.State != engine.Waiting {
			r.fatal("%d was admitted in the step that preempted it", q.Tag)
		}
	}
	held := 0
	var first *engine.Sequence // in the queue, of those never admitted
	for _, q := range r.added {
		held += q.Blocks()
		if due, ok := r.due[q]; ok && due <= r.now && !r.ended[q] {
			r.fatal("%d still there, due at %v", q.Tag, due)
		}
		if (q.State >= engine.Finished) != r.ended[q] {
			r.fatal("%d has state %d, ended %t", q.Tag, q.State, r.ended[q])
		}
		if first != nil && q.Admitted >= 0 {
			r.fatal("%d was admitted before %d", q.Tag, first.Tag)
		}
		if first == nil && q.State == engine.Waiting && q.Admitted < 0 {
			first = q
		}
	}
	if used := r.core.Stats().BlocksUsed; used > held || used > r.cfg.Blocks {
		r.fatal("%d blocks used, %d held", used, held)
	}
	return s.Idle
}

func (r *run) all() string {
	for range 150 {
		switch r.rng.IntN(6) {
		case 0, 1:
			r.add()
		case 2:
			r.abort()
		case 3: // somewhere inside the step in flight
			r.now += time.Duration(r.rng.Int64N(int64(max(1, r.next-r.now))))
			r.step()
		default:
			r.now = max(r.now, r.next)
			r.step()
		}
	}
	for n := 0; ; n++ {
		r.now = max(r.now, r.next)
		s := r.core.Stats()
		if r.step() {
			break
		}
		if r.next == 0 { // only aborts are left to wait for
			r.now += r.cfg.AbortLag
		}
		if n > 100_000 {
			r.fatal("never idle: %+v", s)
		}
	}
	s := r.core.Stats()
	if s.Leaked == 0 && (s.BlocksUsed != 0 || len(r.ended) != len(r.added)) {
		r.fatal("idle with %+v, %d of %d ended", s, len(r.ended), len(r.added))
	}
	if int(s.Finished+s.Aborted) != len(r.ended) {
		r.fatal("%d ended, %+v", len(r.ended), s)
	}
	return r.log.String()
}

func TestRandom(t *testing.T) {
	var sum engine.Stats
	for seed := range uint64(100) {
		r := newRun(t, seed)
		log := r.all()
		if seed%10 == 0 {
			if d := cmp.Diff(log, newRun(t, seed).all()); d != "" {
				t.Fatalf("seed %d is not deterministic:\n%s", seed, d)
			}
		}
		s := r.core.Stats()
		sum.Preemptions, sum.Finished, sum.Aborted, sum.Leaked = sum.Preemptions+s.Preemptions, sum.Finished+s.Finished, sum.Aborted+s.Aborted, sum.Leaked+s.Leaked
	}
	if sum.Preemptions < 300 || sum.Finished < 300 || sum.Aborted < 300 || sum.Leaked < 30 {
		t.Errorf("the runs were too quiet: %+v", sum)
	}
}

// steady returns a core with 256 sequences that decode.
func steady(t testing.TB) (*engine.Core, time.Duration) {
	c := engine.New(engine.Config{Blocks: 256 * 64})
	for range 256 {
		add(t, c, 0, engine.Request{Prompt: 16, Output: 1000})
	}
	now := c.Step(0).Next
	now = c.Step(now).Next
	if s := c.Step(now); s.Decodes < 128 {
		t.Fatalf("not steady: %+v", s)
	}
	return c, now
}

func TestStepDoesNotAllocate(t *testing.T) {
	c, now := steady(t)
	if n := testing.AllocsPerRun(500, func() { now = c.Step(now).Next }); n != 0 {
		t.Errorf("%v allocations a step", n)
	}
}

func BenchmarkStep(b *testing.B) {
	c, now := steady(b)
	b.ReportAllocs()
	for b.Loop() {
		s := c.Step(now)
		if now = s.Next; s.Idle {
			b.StopTimer()
			c, now = steady(b)
			b.StartTimer()
		}
	}
	b.ReportMetric(256, "sequences")
}
