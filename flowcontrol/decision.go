package flowcontrol

import (
	"fmt"
	"strings"
	"time"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/internal/policy"
)

// Why is the reason of a decision: a label of low cardinality.
type Why string

// The reasons why somebody is evicted, and why nobody is.
const (
	KV      Why = "kv"      // the victims' KV cache is needed
	Slot    Why = "slot"    // a victim's place in the batch is needed
	Prefill Why = "prefill" // the victims' prefills stand before an urgent one

	Coming   Why = "coming"   // enough is coming back already
	Disabled Why = "disabled" // evictions are off
	Stale    Why = "stale"    // there is no fresh sample
	Breaker  Why = "breaker"  // evictions there showed no effect
	Budget   Why = "budget"   // too much work was destroyed already
	Hopeless Why = "hopeless" // it is too late for the request's target
	Nothing  Why = "nothing"  // nothing that may be evicted is enough
)

// A Decision says who ends for whom, or why nobody does.
type Decision struct {
	For      Waiting       // who the decision is for
	Waited   time.Duration // how long it has
	Why      Why
	Endpoint string        // where room is made; "" if nowhere, or for the whole pool
	DryRun   bool          // it was not carried out
	Victims  []Victim      // who is to end: nobody unless Why is KV, Slot or Prefill
	Need     int64         // tokens that must come free; for Prefill, of prompts. For Slot, requests if a Reclaimer decides, and 0 if a Pool does
	Freed    int64         // of these, what the victims free as far as is known
	Coming   int64         // what earlier endings are still expected to free there, in the same unit
	Lost     time.Duration // engine time that the victims' work has taken, estimated
	Others   []Alternative // other endpoints that were looked at
}

// Waiting is work that waits for capacity.
type Waiting struct {
	ID        string
	Priority  int
	Tokens    int64    // that it needs; 0 is unknown
	Endpoints []string // where it may run; nil is anywhere
}

// A Victim is a request that ends, as it was when that was decided.
type Victim struct {
	Handle    *abort.Handle
	Priority  int
	Tokens    int64 // that it holds
	Generated int64 // tokens
	Age       time.Duration
	Lost      time.Duration // engine time that its work has taken, estimated
}

// An Alternative is an endpoint that was not chosen.
type Alternative struct {
	Endpoint string
	Why      Why           // why nobody is evicted there; KV if that would have cost more
	Need     int64         // tokens that must have come free
	Cost     time.Duration // what it would have cost: lost engine time, more for those that had come far, and the wait there
}

// Evicts reports whether the decision has victims.
func (d Decision) Evicts() bool { return len(d.Victims) > 0 }

// String returns the decision as a sentence.
func (d Decision) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "for a request of priority %d that has waited %v: ", d.For.Priority, d.Waited.Round(time.Millisecond))
	where := ""
	if d.Endpoint != "" {
		where = " on " + d.Endpoint
	}
	if !d.Evicts() {
		fmt.Fprintf(&b, "evict nobody%s, %s", where, explain[d.Why])
	} else {
		would := ""
		if d.DryRun {
			would = "would "
		}
		fmt.Fprintf(&b, "%sevict %d%s, %s", would, len(d.Victims), where, explain[d.Why])
		if d.Why != Slot {
			fmt.Fprintf(&b, "; %d are needed, %d come free", d.Need, d.Freed)
		}
		if d.Coming > 0 {
			fmt.Fprintf(&b, " beside %d that are coming", d.Coming)
		}
		if d.Lost > 0 {
			fmt.Fprintf(&b, ", for %v of lost work", d.Lost.Round(time.Millisecond))
		}
		for i, v := range d.Victims {
			fmt.Fprintf(&b, "%s priority %d, %d tokens, %d generated, %v old", [...]string{":", ";"}[min(i, 1)], v.Priority, v.Tokens, v.Generated, v.Age.Round(time.Millisecond))
		}
	}
	for i, o := range d.Others {
		fmt.Fprintf(&b, "%s %s ", [...]string{". Elsewhere:", ";"}[min(i, 1)], o.Endpoint)
		if o.Why == KV {
			fmt.Fprintf(&b, "would have cost %v", o.Cost.Round(time.Millisecond))
		} else {
			b.WriteString(explain[o.Why])
		}
	}
	return b.String()
}

var explain = map[Why]string{
	KV:       "whose KV cache it needs",
	Slot:     "whose place in the batch it needs",
	Prefill:  "whose prefills stand before its own",
	Coming:   "enough is coming back",
	Disabled: "evictions are off",
	Stale:    "there is no fresh sample",
	Breaker:  "evictions show no effect",
	Budget:   "too much work was destroyed already",
	Hopeless: "too late for its target",
	Nothing:  "nothing that may be evicted is enough",
}

// public is a decision of the core as others see it.
func public(d *policy.Decision) Decision {
	l := d.For.Tag.(*Lease)
	out := Decision{
		For:    Waiting{l.req.ID, l.req.Priority, d.For.Prompt, l.req.Endpoints},
		Waited: d.Waited, Why: Why(d.Why), Endpoint: d.Endpoint, DryRun: d.DryRun,
		Need: d.Need, Freed: d.Freed, Coming: d.Coming, Lost: milliseconds(d.Work),
	}
	for _, v := range d.Victims {
		out.Victims = append(out.Victims, Victim{
			v.Request.Tag.(*Lease).handle, v.Priority, v.Tokens, v.Generated, v.Age, milliseconds(v.Work),
		})
	}
	for _, o := range d.Others {
		out.Others = append(out.Others, Alternative{o.Endpoint, Why(o.Why), o.Need, milliseconds(o.Cost)})
	}
	return out
}

func milliseconds(ms float64) time.Duration { return time.Duration(ms * float64(time.Millisecond)) }
