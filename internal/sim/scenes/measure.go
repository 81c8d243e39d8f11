package main

import (
	"fmt"
	"math"
	"os"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/extevict/extevict/internal/sim"
)

// numbers are what is kept of a run, by name, so that means can be taken.
type numbers map[string]float64

const (
	p50       = "TTFT p50"
	p99       = "p99"
	longest   = "max ms"
	onTime    = "on time %"
	wait99    = "wait p99 ms"
	rate      = "tok/s"
	evictions = "evictions"
	most      = "most of one"
	gaveUp    = "give-ups"
	waste     = "waste %"
	late      = "late in the last third %"
	preempted = "preempted by engines"
)

// columns of a table of policies.
var columns = []string{p50, p99, longest, onTime, wait99, rate, evictions, most, gaveUp, waste, preempted}

func summary(r *sim.Result) numbers {
	ms := func(ds []time.Duration, q float64) float64 { return float64(sim.Quantile(ds, q)) / 1e6 }
	after := 0
	for _, t := range r.Late {
		if t > r.Duration*2/3 {
			after++
		}
	}
	return numbers{
		p50: ms(r.TTFT, .5), p99: ms(r.TTFT, .99), longest: ms(r.TTFT, 1), onTime: 100 * r.OnTime, wait99: ms(r.Waits, .99),
		rate: r.TokensPerSecond(), evictions: float64(r.Evictions), most: float64(r.MostEvictions), gaveUp: float64(r.GaveUp),
		waste: 100 * r.Waste, preempted: float64(r.Preemptions), late: 100 * float64(after) / math.Max(1, float64(len(r.TTFT))),
	}
}

// pool runs as many functions at a time as it has slots.
type pool struct {
	slots chan struct{}
	wg    sync.WaitGroup
}

func (p *pool) run(f func()) {
	p.wg.Go(func() {
		p.slots <- struct{}{}
		defer func() { <-p.slots }()
		f()
	})
}

// A variant is a scene under one policy, with one setting.
type variant struct {
	name string
	run  func(seed uint64) numbers
}

func simulated(name string, c sim.Config, p sim.Policy) variant {
	return variant{name, func(seed uint64) numbers {
		c := c
		c.Seed, c.Policy = seed, p
		return summary(sim.Run(c, nil))
	}}
}

type scene struct {
	name, what string
	variants   []variant
	columns    []string // of its table; nil is columns
	targets    func(results) []target
}

// A target is what a scene must reach, what the goal is and what came out.
type target struct {
	what       string
	must, goal string // "-" for none
	result     string
	missed     bool // the must
}

// results are the runs of each variant, by seed.
type results map[string][]numbers

// mean is the mean of a number over a variant's seeds.
func (r results) mean(variant, number string) (sum float64) {
	for _, n := range r[variant] {
		sum += n[number]
	}
	return sum / float64(len(r[variant]))
}

// ratio is the mean of a number, of each seed in relation to a baseline's with the same seed.
func (r results) ratio(variant, baseline, number string) (sum float64) {
	for i, n := range r[variant] {
		sum += n[number] / r[baseline][i][number]
	}
	return sum / float64(len(r[variant]))
}

// most is the largest of a variant's seeds.
func (r results) most(variant, number string) (most float64) {
	for _, n := range r[variant] {
		most = max(most, n[number])
	}
	return most
}

// each tells a number for each seed.
func (r results) each(variant, number, format string) string {
	var b strings.Builder
	for i, n := range r[variant] {
		if i > 0 {
			b.WriteString(" ")
		}
		fmt.Fprintf(&b, format, n[number])
	}
	return b.String()
}

func (p *pool) results(vs []variant, seeds int) results {
	r := results{}
	for _, v := range vs {
		ns := make([]numbers, seeds)
		r[v.name] = ns
		for i := range ns {
			p.run(func() { ns[i] = v.run(uint64(i + 1)) })
		}
	}
	return r
}

// measure runs the scenes, prints their tables and their targets, and reports whether no must is missed.
func measure(p *pool, scenes []scene, seeds int) bool {
	all := make([]results, len(scenes))
	for i, s := range scenes {
		all[i] = p.results(s.variants, seeds)
	}
	p.wg.Wait()
	for i, s := range scenes {
		fmt.Printf("\n%s: %s\n", s.name, s.what)
		show(s, all[i])
	}
	fmt.Println()
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "scene\twhat\tmust\tgoal\tresult\tmust reached")
	ok := true
	for i, s := range scenes {
		for _, t := range s.targets(all[i]) {
			verdict := "pass"
			switch {
			case t.must == "-":
				verdict = "-"
			case t.missed:
				verdict, ok = "FAIL", false
			}
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", s.name, t.what, t.must, t.goal, t.result, verdict)
		}
	}
	w.Flush()
	return ok
}

func show(s scene, r results) {
	cs := s.columns
	if cs == nil {
		cs = columns
	}
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(w, "policy\t%s\t\n", strings.Join(cs, "\t"))
	for _, v := range s.variants {
		fmt.Fprintf(w, "%s\t", v.name)
		for _, c := range cs {
			format := "%.0f\t"
			if strings.HasSuffix(c, "%") {
				format = "%.2f\t"
			}
			fmt.Fprintf(w, format, r.mean(v.name, c))
		}
		fmt.Fprintln(w)
	}
	w.Flush()
}
