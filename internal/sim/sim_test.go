package sim_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/extevict/extevict/internal/engine"
	"github.com/extevict/extevict/internal/policy"
	"github.com/extevict/extevict/internal/sim"
)

var (
	ours   = sim.Ours{Config: policy.Config{Evict: true}}
	oracle = sim.Ours{Config: policy.Config{Evict: true}, Perfect: true}
	gauge  = sim.Gauge{Evict: 2, Concurrency: 14, Grace: 10 * time.Millisecond}
)

// policies are all there are.
var policies = map[string]sim.Policy{
	"none": sim.Gauge{}, "gauge, concurrency": gauge, "gauge, lagging": sim.Gauge{Evict: 2, Grace: 100 * time.Millisecond},
	"no eviction": sim.Ours{}, "ours": ours, "oracle": oracle,
	"dry run": sim.Ours{Config: policy.Config{Evict: true, DryRun: true}}, "short queue": sim.Ours{Config: policy.Config{Evict: true, MaxWaiting: 100}},
}

// scene is 40 s of the slices on engines that are too small for them.
func scene(t *testing.T) sim.Config {
	var urgent []sim.Record
	for i, r := range slice(t, "azure-code.csv") {
		r.Prompt = min(r.Prompt, 4000)
		r.At = time.Duration(i) * 70 * time.Millisecond
		urgent = append(urgent, r)
	}
	return sim.Config{
		Seed: 1, Duration: 40 * time.Second, Warm: 5 * time.Second, Endpoints: 3, Engine: engine.Config{Blocks: 1200},
		Urgent: urgent, Sheddable: slice(t, "azure-conv.csv"), Workers: 120, Policy: ours,
	}
}

// faults are scenes where something is out of order.
var faults = map[string]func(*sim.Config){
	"none":                 func(*sim.Config) {},
	"retry at once":        func(c *sim.Config) { c.Retry = sim.Immediate },
	"Retry-After":          func(c *sim.Config) { c.Retry = sim.RetryAfter },
	"never again":          func(c *sim.Config) { c.Retry = sim.Never },
	"gives up soon":        func(c *sim.Config) { c.Retry, c.GiveUp = sim.Immediate, 1 },
	"endpoint removed":     func(c *sim.Config) { c.Remove = 20 * time.Second },
	"the only one removed": func(c *sim.Config) { c.Endpoints, c.Remove = 1, 20*time.Second },
	"only one feasible":    func(c *sim.Config) { c.Only = 1 },
	"feasible one removed": func(c *sim.Config) { c.Endpoints, c.Only, c.Remove = 2, 2, 20*time.Second },
	"roles":                func(c *sim.Config) { c.Split = 1 },
	"two gateways":         func(c *sim.Config) { c.Gateways = 2 },
	"overload":             func(c *sim.Config) { c.Overload = [2]time.Duration{10 * time.Second, 20 * time.Second} },
	"bad samples":          func(c *sim.Config) { c.SampleLag, c.SampleLoss, c.Jitter = 100*time.Millisecond, 0.3, 0.9 },
	"outage":               func(c *sim.Config) { c.Outage = [2]time.Duration{10 * time.Second, 20 * time.Second} },
	"slow aborts":          func(c *sim.Config) { c.Engine.AbortLag, c.Confirm = time.Second, 500*time.Millisecond },
	"unconfirmed aborts":   func(c *sim.Config) { c.Unconfirmed = 0.2 },
	"aborts without end":   func(c *sim.Config) { c.Engine.AbortMode = engine.AbortNever },
	"leaks":                func(c *sim.Config) { c.Engine.AbortMode = engine.AbortLeak },
}

func TestDeterministic(t *testing.T) {
	same := cmp.Options{cmpopts.IgnoreFields(sim.Result{}, "Decisions"), cmpopts.IgnoreUnexported(sim.Result{})}
	for name, p := range policies {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := scene(t)
			c.Policy, c.Gateways, c.Record = p, 2, time.Second
			c.Jitter, c.SampleLag, c.SampleLoss, c.Unconfirmed, c.Remove = 0.5, 20*time.Millisecond, 0.1, 0.1, 30*time.Second
			first := sim.Run(c, nil)
			if d := cmp.Diff(first, sim.Run(c, nil), same); d != "" {
				t.Errorf("the same scene again: -first +second:\n%s", d)
			}
			if c.Seed++; cmp.Equal(first, sim.Run(c, nil), same) {
				t.Error("another seed gave the same result")
			}
		})
	}
}

// Nothing is lost: each job ends in one way, and each eviction is in the account.
func TestAccounts(t *testing.T) {
	for fault, set := range faults {
		for name, p := range policies {
			if fault != "none" && name != "ours" && name != "gauge, concurrency" {
				continue // enough
			}
			t.Run(fault+"/"+name, func(t *testing.T) {
				t.Parallel()
				c := scene(t)
				c.Policy = p
				set(&c)
				r := sim.Run(c, nil)
				ended := r.UrgentDone + r.SheddableDone + r.GaveUp + r.Rejected + r.WaitingUrgent + r.WaitingSheddable + r.Running + r.Retrying
				if r.Jobs != ended || r.Jobs == 0 {
					t.Errorf("%d jobs came, %d are accounted for: %+v", r.Jobs, ended, r)
				}
				wasted := 0
				for _, e := range r.Evicted {
					wasted += e.Prompt + e.Tokens
				}
				if len(r.Evicted) != r.Evictions || wasted != r.WastedTokens {
					t.Errorf("%d evictions of %d tokens, listed are %d of %d", r.Evictions, r.WastedTokens, len(r.Evicted), wasted)
				}
				if n := len(r.TTFT); n != 400 || len(r.Late) != n-int(r.OnTime*float64(n)+0.5) {
					t.Errorf("%d urgent requests, %d late, %v on time, want 400 in all", n, len(r.Late), r.OnTime)
				}
				giveUp := c.GiveUp
				if giveUp == 0 {
					giveUp = 6
				}
				if r.MostEvictions > giveUp+1 {
					t.Errorf("one request was evicted %d times, its client gives up after %d", r.MostEvictions, giveUp)
				}
				if !slices.IsSorted(r.TTFT) || !slices.IsSorted(r.Late) || !slices.IsSorted(r.Waits) || !slices.IsSorted(r.SheddableTTFT) {
					t.Error("not in order")
				}
			})
		}
	}
}

// run runs the scene with some of it set.
func run(t *testing.T, set func(*sim.Config)) *sim.Result {
	c := scene(t)
	set(&c)
	return sim.Run(c, nil)
}

// within counts the evictions on an endpoint, "" for all, from one time to another.
func within(r *sim.Result, endpoint string, from, to time.Duration) (n int) {
	for _, e := range r.Evicted {
		if (endpoint == "" || e.Endpoint == endpoint) && e.At >= from && e.At < to {
			n++
		}
	}
	return n
}

func TestKnobs(t *testing.T) {
	base := run(t, func(*sim.Config) {})
	if base.Evictions < 10 || within(base, "e01", 0, time.Minute) == 0 || within(base, "", 10500*time.Millisecond, 20*time.Second) == 0 {
		t.Fatalf("%d evictions: the scene is too easy", base.Evictions)
	}
	evictions := func(r *sim.Result) int { return r.Evictions }
	for _, c := range []struct {
		name string
		set  func(*sim.Config)
		got  func(*sim.Result) int
		ok   func(n int) bool
	}{
		{"no sample comes", func(c *sim.Config) { c.SampleLoss = 1 }, evictions, func(n int) bool { return n == 0 }},
		{"all samples come too late", func(c *sim.Config) { c.SampleLag = time.Hour }, evictions, func(n int) bool { return n == 0 }},
		{"outage, in it", func(c *sim.Config) { c.Outage = [2]time.Duration{10 * time.Second, 20 * time.Second} },
			func(r *sim.Result) int { return within(r, "", 10500*time.Millisecond, 20*time.Second) }, func(n int) bool { return n == 0 }},
		{"outage, around it", func(c *sim.Config) { c.Outage = [2]time.Duration{10 * time.Second, 20 * time.Second} }, evictions, func(n int) bool { return n > 0 }},
		{"never again", func(c *sim.Config) { c.Retry = sim.Never }, func(r *sim.Result) int { return r.Evictions - r.GaveUp + r.MostEvictions }, func(n int) bool { return n == 1 }},
		{"Retry-After", func(c *sim.Config) { c.Retry = sim.RetryAfter },
			func(r *sim.Result) int { return r.Retrying - within(r, "", 39*time.Second, time.Minute) }, func(n int) bool { return n >= 0 }},
		{"at once", func(c *sim.Config) { c.Retry = sim.Immediate }, func(r *sim.Result) int { return r.Retrying }, func(n int) bool { return n == 0 }},
		{"gives up", func(c *sim.Config) { c.Retry, c.GiveUp, c.Policy = sim.Immediate, 1, gauge }, func(r *sim.Result) int { return r.GaveUp }, func(n int) bool { return n > 0 }},
		{"removed: nothing ends there", func(c *sim.Config) { c.Endpoints, c.Remove = 2, 20*time.Second },
			func(r *sim.Result) int { return within(r, "e01", 20*time.Second, time.Minute) }, func(n int) bool { return n == 0 }},
		{"only the first: nothing ends elsewhere for KV cache", func(c *sim.Config) { c.Only = 1 },
			func(r *sim.Result) int { return r.Evictions - within(r, "e00", 0, time.Minute) }, func(n int) bool { return n == 0 }},
		{"no sheddable work", func(c *sim.Config) { c.Workers = 0 }, func(r *sim.Result) int { return r.Evictions + r.SheddableDone }, func(n int) bool { return n == 0 }},
		{"no urgent work", func(c *sim.Config) { c.Urgent = nil }, evictions, func(n int) bool { return n == 0 }},
		{"dry run", func(c *sim.Config) { c.Policy = policies["dry run"] }, evictions, func(n int) bool { return n == 0 }},
		{"short queue", func(c *sim.Config) { c.Policy, c.Workers = policies["short queue"], 400 }, func(r *sim.Result) int { return r.Rejected }, func(n int) bool { return n > 0 }},
		{"aborts that end nothing take room", func(c *sim.Config) { c.Engine.AbortMode = engine.AbortNever }, func(r *sim.Result) int { return r.SheddableDone - base.SheddableDone }, func(n int) bool { return n < 0 }},
		{"streams without end hold a gauge up for 10 s", func(c *sim.Config) { c.Policy, c.Unconfirmed = gauge, 1 }, evictions, func(n int) bool { return n > 0 && n <= 10 }},
		{"slow streams hold a gauge up", func(c *sim.Config) { c.Policy, c.Confirm = gauge, 2*time.Second }, evictions, func(n int) bool { return n > 0 && n <= 50 }},
		{"the oracle needs no samples", func(c *sim.Config) { c.Policy, c.SampleLoss = oracle, 1 }, evictions, func(n int) bool { return n > 0 }},
		{"a late target", func(c *sim.Config) { c.Target = time.Minute }, func(r *sim.Result) int { return len(r.Late) }, func(n int) bool { return n == 0 }},
		{"usage is recorded", func(c *sim.Config) { c.Record = time.Second }, func(r *sim.Result) int { return len(r.Usage) }, func(n int) bool { return n >= 110 && n <= 120 }},
		{"it is not recorded of what is removed", func(c *sim.Config) { c.Record, c.Remove = time.Second, 20*time.Second }, func(r *sim.Result) int { return len(r.Usage) }, func(n int) bool { return n >= 90 && n <= 100 }},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := run(t, c.set)
			if n := c.got(r); !c.ok(n) {
				t.Errorf("got %d; %d evictions, without it %d", n, r.Evictions, base.Evictions)
			}
		})
	}
}

// What differs between two scenes differs in the direction it should.
func TestKnobsCompare(t *testing.T) {
	p99 := func(r *sim.Result) float64 { return sim.Quantile(r.TTFT, 0.99).Seconds() }
	for _, c := range []struct {
		name       string
		less, more func(*sim.Config)
		of         func(*sim.Result) float64
	}{
		{"urgent work alone is quicker", func(c *sim.Config) { c.Workers = 0 }, func(*sim.Config) {}, p99},
		{"evictions help", func(*sim.Config) {}, func(c *sim.Config) { c.Policy = sim.Ours{} }, p99},
		{"overload hurts", func(c *sim.Config) { c.Workers = 0 }, func(c *sim.Config) { faults["overload"](c); c.Workers = 0 }, p99},
		{"the gauge's lag hurts", func(c *sim.Config) { c.Policy = gauge }, func(c *sim.Config) { c.Policy = sim.Gauge{} }, p99},
		{"shared prefixes are computed once", func(c *sim.Config) { c.Engine.Blocks = 4000 }, func(c *sim.Config) { c.Engine.Blocks, c.SharePrefix = 4000, true },
			func(r *sim.Result) float64 { return r.TokensPerSecond() }},
		{"time compression", func(c *sim.Config) { c.Duration = 20 * time.Second }, func(c *sim.Config) { c.Duration, c.Scale = 20*time.Second, 2 },
			func(r *sim.Result) float64 { return float64(len(r.TTFT)) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			with := func(set func(*sim.Config)) float64 {
				return c.of(run(t, func(s *sim.Config) {
					s.Sheddable = slices.Concat(slice(t, "mooncake-conversation.jsonl"), s.Sheddable)
					set(s)
				}))
			}
			if less, more := with(c.less), with(c.more); less >= more {
				t.Errorf("got %v and %v, want less and more", less, more)
			}
		})
	}
}

// The oracle learns what engines do from them: when streams end doesn't matter to it.
func TestOracle(t *testing.T) {
	with := func(confirm time.Duration) *sim.Result {
		return run(t, func(c *sim.Config) { c.Policy, c.Confirm = oracle, confirm })
	}
	if d := cmp.Diff(with(time.Millisecond), with(time.Second), cmpopts.IgnoreFields(sim.Result{}, "Decisions"), cmpopts.IgnoreUnexported(sim.Result{})); d != "" {
		t.Errorf("streams end after 1 ms, 1 s: -quick +slow:\n%s", d)
	}
}

// What a trace says is of no priority is sheddable, though it comes when the trace says.
func TestPriorities(t *testing.T) {
	r := run(t, func(c *sim.Config) {
		for i := range c.Urgent {
			if i%2 == 1 {
				c.Urgent[i].Priority, c.Urgent[i].Prioritized = -1, true
			}
		}
		c.Workers = 0
		c.Duration = 5 * time.Minute
	})
	if got, want := []int{len(r.TTFT), r.UrgentDone, r.SheddableDone, len(r.SheddableTTFT), r.Jobs}, []int{200, 200, 200, 200, 400}; !slices.Equal(got, want) {
		t.Errorf("urgent, done, sheddable done, their first tokens, all: got %v, want %v", got, want)
	}
}

func TestBadScenes(t *testing.T) {
	for name, set := range map[string]func(*sim.Config){
		"no policy": func(c *sim.Config) { c.Policy = nil },
		"jitter":    func(c *sim.Config) { c.Jitter = 1 },
		"only":      func(c *sim.Config) { c.Only = 4 },
		"roles":     func(c *sim.Config) { c.Split = 3 },
		"workers":   func(c *sim.Config) { c.Workers = -1 },
		"time":      func(c *sim.Config) { c.Scale = -1 },
	} {
		t.Run(name, func(t *testing.T) {
			c := scene(t)
			set(&c)
			defer func() {
				if text, ok := recover().(string); !ok || !strings.HasPrefix(text, "sim: ") {
					t.Errorf("panic is %q, want one of sim", text)
				}
			}()
			sim.Run(c, nil)
		})
	}
}

// Each decision is told, with the time and the victims that the result has.
func TestObserve(t *testing.T) {
	n := 0
	r := run(t, func(c *sim.Config) {
		o := ours
		o.Observe = func(d *policy.Decision) { n += len(d.Victims) }
		c.Policy = o
	})
	if n != r.Evictions || n == 0 {
		t.Errorf("told of %d victims, %d were evicted", n, r.Evictions)
	}
}
