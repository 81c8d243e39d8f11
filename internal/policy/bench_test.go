package policy_test

import (
	"runtime"
	"testing"
	"time"

	"github.com/extevict/extevict/internal/policy"
)

// crowd returns 8 endpoints with 256 sheddable requests each, full, and the time.
func crowd(tb testing.TB, c policy.Config) (*policy.Core, time.Duration) {
	const each = 256
	c.Sheddable, c.SheddableCeiling = 1, 0.97
	core, now := policy.New(c), time.Second
	for i := range 8 {
		name := string(rune('a' + i))
		core.SetEndpoint(now, policy.Endpoint{Name: name, Capacity: 241_000})
		for j := range each {
			r := &policy.Request{Prompt: int64(400 + (j*37+i)%600), Endpoints: []string{name}}
			core.Offer(now, r)
			if core.Step(now); r.State() != policy.Active {
				tb.Fatalf("%d of %s: state %d", j, name, r.State())
			}
			core.Count(now, r, true, int64(j*13%400))
		}
	}
	fill(core, now)
	r := &policy.Request{Priority: 1, Prompt: 233_000} // for which too many would have to end
	core.Offer(now, r)
	core.Step(now) // makes the buffers that every later pass has
	core.Finish(now, r, false)
	return core, now
}

func fill(core *policy.Core, now time.Duration) {
	core.Status(now, func(s policy.Status) {
		core.Sample(now, s.Name, policy.Sample{Used: core.Ledger(s.Name).ActiveTokens, At: now})
	})
}

// BenchmarkDecide is one pass over 8 endpoints with 256 leases each, of 32 requests that all
// need victims: one or two each, or dozens.
func BenchmarkDecide(b *testing.B) {
	for name, prompt := range map[string]int64{"few": 5000, "many": 30_000} {
		b.Run(name, func(b *testing.B) {
			evicted := 0
			for b.Loop() {
				b.StopTimer()
				core, now := crowd(b, policy.Config{Evict: true})
				for range 32 {
					core.Offer(now, &policy.Request{Priority: 1, Prompt: prompt})
				}
				// The collector's work is not the pass's, and a gateway looks at its leases all the time.
				runtime.GC()
				for r := range core.Active {
					core.Count(now, r, true, r.Generated())
				}
				b.StartTimer()
				for _, d := range core.Step(now).Decisions {
					evicted += len(d.Victims)
				}
			}
			b.ReportMetric(float64(evicted)/float64(b.N), "victims/op")
		})
	}
}

// BenchmarkWaiting is a pass that looks at 32 requests which must go on waiting.
func BenchmarkWaiting(b *testing.B) {
	core, now := crowd(b, policy.Config{})
	for i := range 32 {
		core.Offer(now, &policy.Request{Priority: 1, Prompt: int64(90_000 - i)})
	}
	for b.Loop() {
		now += time.Millisecond
		core.Step(now)
	}
}

// BenchmarkQueue is a pass over 10,000 requests that must go on waiting.
func BenchmarkQueue(b *testing.B) {
	core, now := crowd(b, policy.Config{Evict: true})
	for i := range 10_000 {
		core.Offer(now, &policy.Request{Priority: 1, Prompt: 230_000 - int64(i)})
	}
	core.Step(now)
	b.ReportAllocs()
	for b.Loop() {
		now += time.Millisecond
		core.Step(now)
	}
}

func TestNothingWaits(t *testing.T) {
	core, now := crowd(t, policy.Config{Evict: true})
	if n := testing.AllocsPerRun(100, func() { now += time.Millisecond; core.Step(now) }); n != 0 {
		t.Errorf("%v allocations when nothing waits", n)
	}
}

// 10,000 that wait are looked at in time that grows with their number, not its square.
func TestQueue(t *testing.T) {
	core, now := crowd(t, policy.Config{})
	for i := range 10_050 {
		core.Offer(now, &policy.Request{Priority: i % 3, Prompt: 80_000 + int64(i%100)})
	}
	start := time.Now()
	st := core.Step(now)
	if d := time.Since(start); d > 200*time.Millisecond { // it is a few ms
		t.Errorf("a pass took %v", d)
	}
	if len(st.Reject) != 50 || core.Waiting() != 10_000 {
		t.Errorf("%d rejected, %d wait", len(st.Reject), core.Waiting())
	}
	if err := core.Check(now); err != nil {
		t.Error(err)
	}
}
