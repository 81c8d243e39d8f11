package main

import (
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	"github.com/extevict/extevict/internal/engine"
	"github.com/extevict/extevict/internal/policy"
	"github.com/extevict/extevict/internal/sim"
)

// Names of policies.
const (
	none        = "none"
	lagging     = "gauge, lagging"
	concurrency = "gauge, concurrency"
	gate        = "ours, no eviction"
	ours        = "ours"
	oracle      = "oracle"
	alone       = "urgent alone"
)

// gauges are the baselines of a scene: the concurrency is what serves urgent requests best.
func gauges(scene string) map[string]sim.Policy {
	n := 24
	if scene == "S3" {
		n = 18
	}
	return map[string]sim.Policy{
		none:        sim.Gauge{},
		lagging:     sim.Gauge{Evict: 2, Grace: 2300 * time.Millisecond},
		concurrency: sim.Gauge{Evict: 2, Concurrency: n, Grace: 10 * time.Millisecond},
	}
}

// policies are the rows of a scene's table.
func policies(scene string, c sim.Config, names ...string) (vs []variant) {
	for _, name := range names {
		c := c
		p := gauges(scene)[name]
		switch name {
		case gate:
			p = sim.Ours{}
		case ours:
			p = sim.Ours{Config: evicting}
		case oracle:
			p = sim.Ours{Config: evicting, Perfect: true}
		case alone:
			c.Workers = 0
			p = sim.Ours{Config: evicting}
		}
		vs = append(vs, simulated(name, c, p))
	}
	return vs
}

var evicting = policy.Config{Evict: true}

// s2 is urgent code completion over a backlog of chats, s3 over one of long prompts.
func (t traces) s2() sim.Config {
	return sim.Config{Urgent: t.code, Scale: 2, Sheddable: t.conv, Workers: 400}
}

func (t traces) s3() sim.Config {
	c := sim.Config{Urgent: t.code, Scale: 2, Sheddable: t.moon, Workers: 150, Engine: engine.Config{Blocks: 16000, Cost: engine.DefaultCost}}
	c.Engine.Cost.Prefill = 20 * time.Microsecond
	return c
}

// bursts are n requests every 20 s.
func bursts(n, prompt, output int, until time.Duration) (rs []sim.Record) {
	for at := time.Duration(0); at < until; at += 20 * time.Second {
		for range n {
			rs = append(rs, sim.Record{At: at, Prompt: prompt, Output: output})
		}
	}
	return rs
}

// essays are requests for long answers: half of them over 1400 tokens, one in a hundred over 12,000.
func essays() (rs []sim.Record) {
	rng := rand.New(rand.NewPCG(14, 0))
	for range 5000 {
		rs = append(rs, sim.Record{Prompt: 200 + rng.IntN(800), Output: min(24_000, 1+int(1400*math.Exp(rng.NormFloat64()*math.Log(12_000.0/1400)/2.326)))})
	}
	return rs
}

// atMost makes a target of the mean of a number.
func atMost(r results, variant, number string, must, goal float64, unit string) target {
	return limit(r, variant, number, must, goal, unit, "<=", 1)
}

// atLeast does the same.
func atLeast(r results, variant, number string, must, goal float64, unit string) target {
	return limit(r, variant, number, must, goal, unit, ">=", -1)
}

// limit makes a target; NaN is none.
func limit(r results, variant, number string, must, goal float64, unit, than string, sign float64) target {
	text := func(v float64) string {
		if math.IsNaN(v) {
			return "-"
		}
		return fmt.Sprintf("%s %s%s", than, trim(v), unit)
	}
	got := r.mean(variant, number)
	what := number
	if variant != ours {
		what = variant + ": " + number
	}
	return target{what, text(must), text(goal), trim(got) + unit + " (" + r.each(variant, number, "%.4g") + ")", sign*got > sign*must}
}

func trim(v float64) string {
	if math.Abs(v) >= 100 {
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.3g", v)
}

// within makes a target of a number in relation to a baseline's of the same seed.
func within(r results, variant, baseline, number string, must, goal float64, than string) target {
	sign := 1.0
	if than == ">=" {
		sign = -1
	}
	got := r.ratio(variant, baseline, number)
	text := func(v float64) string {
		if math.IsNaN(v) {
			return "-"
		}
		return fmt.Sprintf("%s %.3g x", than, v)
	}
	what := fmt.Sprintf("%s, of %s (%s)", number, baseline, trim(r.mean(baseline, number)))
	if variant != ours {
		what = variant + ": " + what
	}
	return target{what, text(must), text(goal), fmt.Sprintf("%.3f x (%s)", got, trim(r.mean(variant, number))), sign*got > sign*must}
}

var no = math.NaN()

func (t traces) scenes() []scene {
	s2, s3 := t.s2(), t.s3()
	with := func(c sim.Config, set func(*sim.Config)) sim.Config {
		set(&c)
		return c
	}
	oursOn := func(name string, c sim.Config) variant { return simulated(name, c, sim.Ours{Config: evicting}) }
	gaugeOn := func(name, scene string, c sim.Config) variant { return simulated(name, c, gauges(scene)[concurrency]) }

	s4 := with(s2, func(c *sim.Config) {
		c.Urgent, c.Scale, c.Duration = bursts(32, 1000, 100, 280*time.Second), 1, 300*time.Second
	})
	s5 := with(s3, func(c *sim.Config) {
		c.Urgent, c.Scale, c.Duration = bursts(1, 60_000, 100, 280*time.Second), 1, 300*time.Second
	})
	s5two := with(s5, func(c *sim.Config) { c.Urgent = bursts(2, 60_000, 100, 280*time.Second) })
	s6 := with(s2, func(c *sim.Config) { c.Scale, c.Only = 1, 1 })
	s8 := []variant{oursOn("fresh, each 50 ms", s2)}
	for _, d := range []time.Duration{50, 200, 1000} {
		d *= time.Millisecond
		s8 = append(s8, oursOn(fmt.Sprint("lag ", d), with(s2, func(c *sim.Config) { c.SampleLag = d })))
		if d > 50*time.Millisecond {
			s8 = append(s8, oursOn(fmt.Sprint("each ", d), with(s2, func(c *sim.Config) { c.Sample = d })))
		}
	}
	s8 = append(s8, oursOn("each 1s, lag 1s", with(s2, func(c *sim.Config) { c.Sample, c.SampleLag = time.Second, time.Second })))
	s8 = append(s8, oursOn("jitter 50 %, loss 20 %", with(s2, func(c *sim.Config) { c.Jitter, c.SampleLoss = 0.5, 0.2 })),
		oursOn("outage", with(s2, func(c *sim.Config) { c.Outage = [2]time.Duration{0, time.Hour} })))

	return []scene{{
		name: "S2", what: "urgent code completion (Azure code x 2) over a backlog of chats (Azure conversation), 48k KV tokens per endpoint",
		variants: policies("S2", s2, none, lagging, concurrency, gate, ours, oracle, alone),
		targets: func(r results) []target {
			return []target{
				atMost(r, ours, p99, 430, no, " ms"), within(r, ours, alone, p99, no, 1.1, "<="),
				atMost(r, ours, evictions, 210, 150, ""), atMost(r, ours, waste, 1.3, 1, ""),
				atLeast(r, ours, rate, 8900, no, ""), within(r, ours, gate, rate, no, 0.98, ">="),
			}
		},
	}, {
		name: "S3", what: "the same over long prompts (Mooncake conversation), 256k KV tokens per endpoint",
		variants: policies("S3", s3, none, lagging, concurrency, gate, ours, oracle, alone),
		targets: func(r results) []target {
			return []target{
				atMost(r, ours, p99, 400, no, " ms"), within(r, ours, alone, p99, no, 1.5, "<="),
				atMost(r, ours, evictions, 25, 15, ""), atMost(r, ours, waste, 0.5, 0.3, ""),
				atLeast(r, ours, rate, 2300, no, ""), within(r, ours, gate, rate, no, 0.995, ">="),
			}
		},
	}, {
		name: "S4", what: "32 urgent requests at once every 20 s (1000 tokens, 100 out) over S2's backlog",
		variants: policies("S2", s4, concurrency, gate, ours, alone),
		targets:  func(r results) []target { return []target{atMost(r, ours, wait99, 25, no, " ms")} },
	}, {
		name: "S5", what: "an urgent prompt of 60,000 tokens every 20 s over S3's backlog; two at once as an outlook",
		variants: append(append(policies("S3", s5, concurrency, gate, ours, alone), oursOn("ours, two", s5two)), gaugeOn("gauge, two", "S3", s5two)),
		targets: func(r results) []target {
			return []target{
				atMost(r, ours, p99, 2700, no, " ms"), within(r, ours, alone, p99, no, 1.5, "<="), atMost(r, ours, waste, 1.6, no, ""),
				atMost(r, "ours, two", p99, no, no, " ms"), atMost(r, "ours, two", waste, no, no, ""),
			}
		},
	}, {
		name: "S6", what: "urgent requests (Azure code x 1) fit 1 of 4 endpoints, over S2's backlog",
		variants: policies("S2", s6, concurrency, gate, ours, alone),
		targets: func(r results) []target {
			return []target{atMost(r, ours, evictions, 450, no, ""), atLeast(r, ours, onTime, 78, no, ""), within(r, ours, alone, onTime, no, no, ">=")}
		},
	}, {
		name: "S7", what: "S2's requests (urgent x 1) where two endpoints prefill and two decode",
		variants: policies("S2", with(s2, func(c *sim.Config) { c.Split, c.Scale = 2, 1 }), concurrency, gate, ours, alone),
		targets: func(r results) []target {
			return []target{within(r, ours, gate, p99, no, no, "<="), atMost(r, ours, evictions, no, no, ""), atMost(r, ours, most, 3, no, "")}
		},
	}, {
		name: "S8", what: "S2 with samples that are rare, late, irregular, or don't come",
		variants: s8,
		targets: func(r results) []target {
			base := "lag 50ms"
			return []target{
				within(r, "lag 200ms", base, p99, 1.15, 1.05, "<="), within(r, "lag 1s", base, p99, 1.15, 1.05, "<="),
				within(r, "each 200ms", "fresh, each 50 ms", p99, 1.15, 1.05, "<="), within(r, "each 1s", "fresh, each 50 ms", p99, 1.15, 1.05, "<="),
				within(r, "each 1s, lag 1s", base, p99, 1.15, 1.05, "<="),
				atMost(r, "outage", evictions, 0, no, ""),
			}
		},
	}, {
		name: "S9", what: "S2 with aborts that take longer, or of which 1 in 20 is never confirmed",
		variants: []variant{
			oursOn("abort lag 300 ms", with(s2, func(c *sim.Config) { c.Engine.AbortLag = 300 * time.Millisecond })),
			oursOn("abort lag 1 s", with(s2, func(c *sim.Config) { c.Engine.AbortLag = time.Second })),
			oursOn("5 % never", with(s2, func(c *sim.Config) { c.Unconfirmed = 0.05 })),
			oursOn("aborts have no effect", with(s2, func(c *sim.Config) { c.Engine.AbortMode = engine.AbortNever })),
			gaugeOn("gauge, abort lag 300 ms", "S2", with(s2, func(c *sim.Config) { c.Engine.AbortLag = 300 * time.Millisecond })),
			gaugeOn("gauge, abort lag 1 s", "S2", with(s2, func(c *sim.Config) { c.Engine.AbortLag = time.Second })),
			gaugeOn("gauge, 5 % never", "S2", with(s2, func(c *sim.Config) { c.Unconfirmed = 0.05 })),
		},
		targets: func(r results) []target {
			stall := atMost(r, "5 % never", longest, 2000, no, "") // wedged is what takes 2 s
			stall.must = "no stall: " + stall.must
			return []target{
				atMost(r, "abort lag 300 ms", p99, 700, no, " ms"), atMost(r, "abort lag 1 s", p99, 1100, no, " ms"), stall,
				atMost(r, "aborts have no effect", evictions, no, no, ""),
			}
		},
	}, {
		name: "S10", what: "victims come again at once, or when they are told to",
		variants: []variant{
			oursOn("S2", with(s2, func(c *sim.Config) { c.Retry = sim.Immediate })), oursOn("S3", with(s3, func(c *sim.Config) { c.Retry = sim.Immediate })),
			oursOn("S2, Retry-After", with(s2, func(c *sim.Config) { c.Retry = sim.RetryAfter })),
			gaugeOn("gauge, S2", "S2", with(s2, func(c *sim.Config) { c.Retry = sim.Immediate })), gaugeOn("gauge, S3", "S3", with(s3, func(c *sim.Config) { c.Retry = sim.Immediate })),
		},
		targets: func(r results) (ts []target) {
			for _, v := range []string{"S2", "S3"} {
				m, g := atMost(r, v, most, 3, no, ""), atMost(r, v, gaveUp, 0, no, "")
				m.missed, g.missed = r.most(v, most) > 3, r.most(v, gaveUp) > 0
				ts = append(ts, m, g)
			}
			return ts
		},
	}, {
		name: "S11", what: "S2 with three times the urgent load from 100 s to 130 s",
		variants: policies("S2", with(s2, func(c *sim.Config) { c.Overload = [2]time.Duration{100 * time.Second, 130 * time.Second} }), concurrency, gate, ours, alone),
		columns:  append([]string{late}, columns...),
		targets: func(r results) []target {
			return []target{within(r, ours, alone, p99, no, no, "<="), atMost(r, ours, late, no, no, ""), atMost(r, ours, evictions, no, no, "")}
		},
	}, {
		name: "S12", what: "no urgent work over S2's backlog",
		variants: policies("S2", with(s2, func(c *sim.Config) { c.Urgent = nil }), ours),
		targets:  func(r results) []target { return []target{atMost(r, ours, evictions, 0, no, "")} },
	}, {
		name: "S13", what: "S2 through two gateways that know nothing of each other",
		variants: policies("S2", with(s2, func(c *sim.Config) { c.Gateways = 2 }), concurrency, gate, ours),
		targets: func(r results) []target {
			return []target{within(r, ours, concurrency, p99, no, no, "<="), atMost(r, ours, evictions, no, no, ""), atMost(r, ours, most, 3, no, "")}
		},
	}, {
		name: "S14", what: "S2's urgent requests over long answers (p50 1.4k, p99 12k tokens)",
		variants: policies("S2", with(s2, func(c *sim.Config) { c.Sheddable = essays() }), concurrency, gate, ours, alone),
		targets: func(r results) []target {
			return []target{within(r, ours, alone, p99, no, no, "<="), within(r, ours, gate, rate, no, no, ">="), atMost(r, ours, evictions, no, no, ""), atMost(r, ours, waste, no, no, "")}
		},
	}}
}

// ablate runs S2 and S3 with one part of the policy left out at a time.
func ablate(p *pool, t traces, seeds int) {
	parts := []struct {
		name string
		part policy.Part
	}{
		{"nothing", 0}, {"budget", policy.Budget}, {"breakers", policy.Breakers}, {"learned lag", policy.LearnedLag},
		{"hopeless", policy.Hopeless}, {"AIMD", policy.AIMD}, {"optimistic", policy.Optimistic}, {"relief", policy.Relief},
		{"observer", policy.Observer}, {"late binding", policy.LateBinding}, {"reprieve", policy.Reprieve},
	}
	scenes := []scene{{name: "S2", what: "without"}, {name: "S3", what: "without"}}
	all := make([]results, 2)
	for i, c := range []sim.Config{t.s2(), t.s3()} {
		for _, part := range parts {
			scenes[i].variants = append(scenes[i].variants, simulated(part.name, c, sim.Ours{Config: policy.Config{Evict: true, Without: part.part}}))
		}
		all[i] = p.results(scenes[i].variants, seeds)
	}
	p.wg.Wait()
	for i, s := range scenes {
		fmt.Printf("\n%s: %s\n", s.name, s.what)
		show(s, all[i])
	}
}
