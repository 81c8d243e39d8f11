package policy

import "time"

// Why says what decided.
type Why string

const (
	WhyNone       Why = ""
	WhyKV         Why = "kv"         // evicted: its KV cache is needed
	WhySlot       Why = "slot"       // evicted: its place in the batch is needed
	WhyPrefill    Why = "prefill"    // evicted: its prefill stands before an urgent one
	WhyComing     Why = "coming"     // not evicted: what is needed is coming back already
	WhyDisabled   Why = "disabled"   // not evicted: evictions are off
	WhyStale      Why = "stale"      // not evicted: no fresh evidence
	WhyBreaker    Why = "breaker"    // not evicted: evictions there show no effect
	WhyBudget     Why = "budget"     // not evicted: too much work destroyed already
	WhyHopeless   Why = "hopeless"   // not evicted: too late for the request's target
	WhyNothing    Why = "nothing"    // not evicted: nothing that may be evicted is enough
	WhyInfeasible Why = "infeasible" // rejected: no endpoint can hold it
	WhyOverloaded Why = "overloaded" // rejected: too many wait
)

// A Decision says who ends for whom, or why nobody does. It is not changed once it is made.
type Decision struct {
	At       time.Duration
	For      *Request
	Waited   time.Duration
	Why      Why
	Endpoint string // where the request is to go; "" if nowhere yet
	DryRun   bool
	Victims  []Victim
	Need     int64    // tokens that must come free for it: KV cache, or prefill for WhyPrefill
	Freed    int64    // tokens that the victims free, as the ledger has them
	Coming   int64    // tokens that earlier evictions are still expected to free there
	Work     float64  // ms of engine time that is lost
	Others   []Option // what else was looked at
}

// A Victim is a request that ends, as it was when that was decided.
type Victim struct {
	Request   *Request
	Priority  int
	Tokens    int64         // that it holds
	Generated int64         // tokens
	Age       time.Duration // since its dispatch
	Work      float64       // ms of engine time that is lost
}

// An Option is an endpoint that was not chosen.
type Option struct {
	Endpoint string
	Why      Why     // why not, or WhyKV if it would have cost more
	Need     int64   // tokens
	Cost     float64 // ms of engine time, weighted, and the wait there
}
