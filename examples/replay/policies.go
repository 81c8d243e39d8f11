package main

import (
	"fmt"
	"image/color"
	"slices"
	"strings"
	"time"

	"github.com/extevict/extevict/internal/policy"
	"github.com/extevict/extevict/internal/sim"
)

// policyRow is one of the policies that are compared.
type policyRow struct {
	key, name, about string
	alone            bool // without sheddable work
	color            color.RGBA
	dashes           []float64 // of its line in plots, in points; nil is a solid line
	make             func(*options) sim.Policy
}

// policyRows are all policies, in the order in which they are shown.
var policyRows = []*policyRow{
	{
		key: "none", name: "none", about: "admits while a gauge of KV usage and queues is below its ceiling; never evicts",
		color: rgb(0x8a8a8a), make: func(*options) sim.Policy { return sim.Gauge{} },
	}, {
		key: "gauge", name: "gauge", about: "the same gauge; at the ceiling evicts the newest two, waits -grace, and looks again",
		color: rgb(0xe69f00), make: func(o *options) sim.Policy { return sim.Gauge{Evict: 2, Grace: max(o.grace, 1)} },
	}, {
		key: "concurrency", name: "concurrency", about: "a gauge of requests in flight, -concurrency on each endpoint; evicts, and looks again in 10 ms",
		color: rgb(0xcc5500), make: func(o *options) sim.Policy {
			return sim.Gauge{Evict: 2, Concurrency: o.concurrency, Grace: 10 * time.Millisecond}
		},
	}, {
		key: "gate", name: "ours, no eviction", about: "flowcontrol's admission: by tokens, urgent requests first; never evicts",
		color: rgb(0x56b4e9), make: func(o *options) sim.Policy { return sim.Ours{Config: o.policy(false)} },
	}, {
		key: "ours", name: "ours", about: "flowcontrol's admission and eviction",
		color: rgb(0x0062a8), make: func(o *options) sim.Policy { return sim.Ours{Config: o.policy(true)} },
	}, {
		key: "oracle", name: "oracle", about: "ours, knowing at each instant what the engines hold",
		color: rgb(0x009e73), dashes: []float64{6, 3},
		make: func(o *options) sim.Policy { return sim.Ours{Config: o.policy(true), Perfect: true} },
	}, {
		key: "alone", name: "urgent alone", about: "ours without sheddable work: the bound for urgent requests",
		color: rgb(0x222222), dashes: []float64{1.5, 2.5}, alone: true,
		make: func(o *options) sim.Policy { return sim.Ours{Config: o.policy(true)} },
	},
}

func rgb(c uint32) color.RGBA { return color.RGBA{uint8(c >> 16), uint8(c >> 8), uint8(c), 255} }

// policy is what package flowcontrol is given.
func (o *options) policy(evict bool) policy.Config {
	return policy.Config{
		Evict: evict, Unstarted: o.unstarted, Ceiling: o.ceiling, SheddableCeiling: o.sheddableCeiling,
		Block: blockSize, Chunk: int64(o.batch),
	}
}

// choose returns the policies of a list of keys; all if it is empty.
func choose(list string) ([]*policyRow, error) {
	if list == "" {
		return policyRows, nil
	}
	want := map[string]bool{}
	for key := range strings.SplitSeq(list, ",") {
		key = strings.TrimSpace(key)
		if !slices.ContainsFunc(policyRows, func(p *policyRow) bool { return p.key == key }) {
			return nil, fmt.Errorf("-policies: there is no %q", key)
		}
		want[key] = true
	}
	return slices.DeleteFunc(slices.Clone(policyRows), func(p *policyRow) bool { return !want[p.key] }), nil
}

// run replays the work under each policy.
func (w *work) run(p *progress) *Report {
	r := &Report{work: w, Settings: w.settings()}
	for i, row := range w.policies {
		c := w.config
		c.Policy = row.make(w.options)
		if row.alone {
			c.Workers = 0
			c.Urgent = slices.DeleteFunc(slices.Clone(c.Urgent), func(r sim.Record) bool { return r.Priority < 0 })
		}
		start, shown := time.Now(), time.Time{}
		res := sim.Run(c, func(now time.Duration) {
			if time.Since(shown) > 100*time.Millisecond {
				shown = time.Now()
				p.now("%d/%d  %-18s %3.0f %%", i+1, len(w.policies), row.name, 100*now.Seconds()/c.Duration.Seconds())
			}
		})
		p.line("%d/%d  %-18s %5.1f s", i+1, len(w.policies), row.name, time.Since(start).Seconds())
		r.Policies = append(r.Policies, summarize(row, res))
	}
	return r
}
