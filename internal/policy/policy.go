// Package policy decides which requests start, wait and end on endpoints of finite
// capacity. It is the core of package flowcontrol.
//
// A [Core] is deterministic: it takes the time as an argument, starts nothing, locks
// nothing, draws no random number and breaks ties by the order of offers. The same
// calls give the same actions, whether a gateway makes them or a simulator.
//
// Its owner tells it what happened (Offer, Count, Finish, Sample and so on), then calls
// [Core.Step], which decides, and does what the Step says. Times are durations since a
// start of the owner's choice; they must not decrease from call to call. Tokens are
// tokens of KV cache, speeds tokens per millisecond, work is milliseconds of one engine.
package policy

import (
	"fmt"
	"math"
	"time"
)

// Forgotten is how long a request whose stream does not end is counted without evidence: its end
// is of no interest any more.
const Forgotten = 30 * time.Second

// A Config says how the core decides. A zero field has a default; the zero Config never
// evicts.
type Config struct {
	Evict     bool // end requests to make room
	DryRun    bool // decide on evictions and report them, but don't evict
	Unstarted bool // evict only requests without a first token
	Sheddable int  // requests of a priority below are sheddable: they alone are evicted, and wait for all others

	Ceiling          float64 // how full an endpoint may be, of its capacity; 0.97
	SheddableCeiling float64 // the same when sheddable work starts, at most; 0.90
	Block            int64   // tokens in a KV block; 16
	Chunk            int64   // prefill tokens in one step of the engine; 2048
	MaxWaiting       int     // requests that wait; 10,000

	Without Part // what to leave out, to learn what it is worth
}

// A Part of the algorithm can be left out.
type Part uint16

const (
	Budget Part = 1 << iota // bound the work that evictions destroy
	Breakers
	LearnedLag  // learn how long an engine takes to free what an abort ended
	Hopeless    // don't evict for a request whose target an eviction cannot save
	AIMD        // lower the ceiling of sheddable work after evictions
	Optimistic  // send a request to the engine while its victims end
	Relief      // evict requests whose prefill stands before an urgent one
	Observer    // correct the ledger by samples
	LateBinding // let a request wait here rather than in an engine's queue
	Reprieve    // spare victims that others made redundant, or one larger makes all
)

// Constants of the algorithm. Times are of the order of a request's round trips and
// were found by simulation, not derived.
const (
	reserve       = 64                     // tokens that an urgent request is expected to generate soon
	defaultTarget = 500 * time.Millisecond // TTFT target of a request without one
	minSlack      = 40 * time.Millisecond  // a request that is late is due this soon
	holdFor       = time.Second            // how long freed capacity is held for its request
	wedgedAfter   = 2 * time.Second        // how long an aborted request's stream may take to end
	breakFor      = 30 * time.Second       // how long a breaker stays open
	breakWindow   = time.Minute            // in which wedges add up
	breakAt       = 3                      // wedges, or evictions in a row without an effect, that open a breaker
	maxEvictions  = 3                      // of one request's work
	maxVain       = 16                     // requests in a pass for which victims are sought and not found
	soon          = 3                      // chunks of prefill before a request, up to which an engine is good for it
	ahead         = 4                      // the same, beyond which it waits here if it would everywhere, sheddable work apart
	recheck       = 5 * time.Millisecond   // how often waiting requests are looked at if nothing happens

	workBase    = 5.0   // ms that an eviction costs, however little it destroys
	workPrefill = 0.025 // ms a token
	workDecode  = 0.25  // ms a token
	hurtDecode  = 0.75  // the same when victims are compared: a client has seen these tokens

	budgetShare = 0.05 // of the endpoints' time may be destroyed
	budgetBurst = 1000 // ms an endpoint

	maxTokens = 1 << 40 // of a prompt, an answer or an endpoint, so that sums of them are exact
)

func (c Config) withDefaults() Config {
	share := func(name string, v *float64, d float64) {
		if *v == 0 {
			*v = d
		}
		if !(*v > 0 && *v <= 1) {
			panic(fmt.Sprintf("flowcontrol: %s is %v, want a share above 0 and up to 1", name, *v))
		}
	}
	share("Ceiling", &c.Ceiling, 0.97)
	share("SheddableCeiling", &c.SheddableCeiling, min(0.90, c.Ceiling))
	count := func(name string, v *int64, d int64) {
		if *v == 0 {
			*v = d
		}
		if *v < 1 || *v > math.MaxInt32 {
			panic(fmt.Sprintf("flowcontrol: %s is %d", name, *v))
		}
	}
	count("Block", &c.Block, 16)
	count("Chunk", &c.Chunk, 2048)
	waiting := int64(c.MaxWaiting)
	count("MaxWaiting", &waiting, 10_000)
	c.MaxWaiting = int(waiting)
	return c
}

func (c *Config) has(p Part) bool { return c.Without&p == 0 }

// A State is where a request is in its life.
type State int8

const (
	Unoffered  State = iota
	Waiting          // offered
	Active           // runs on an endpoint
	Reclaiming       // ended, its capacity not yet back
	Done
)

// A Request is one piece of work, from its offer until its capacity is back. The owner
// fills in the exported fields before Offer and leaves them alone from then on; the rest is
// the core's.
type Request struct {
	Priority  int           // higher matters more
	Prompt    int64         // tokens
	Target    time.Duration // for the first token; 0 is 500 ms
	Endpoints []string      // where it can run; nil is anywhere
	Evictions int           // how often this work was evicted before
	Fixed     bool          // can't be evicted
	Tag       any           // the owner's own

	state      State
	seq        uint64
	offered    time.Duration
	feasible   []*endpoint // of Endpoints, as of epoch
	epoch      uint64
	need       int64 // tokens to start it: F of the algorithm
	why        Why   // of the latest decision about it
	dry        bool  // a dry run has said who would end for it
	held       *endpoint
	heldSince  time.Duration
	ep         *endpoint // where it runs
	at         int       // its place in ep.active
	dispatched time.Duration
	first      bool // its first token was seen
	generated  int64
	tokens     int64         // what it holds, in whole blocks
	spared     time.Duration // not a victim before
	evicted    bool          // by the core
	legs       *[]*Request   // of the same work, if there are several

	issued time.Duration // when it was ended
	ended  time.Duration // when its stream was seen to have ended; -1 before
	due    time.Duration // when its capacity should be back
	hung   bool          // its stream has not ended when it should
	wedged bool          // nor long after
	left   bool          // its client has left, or somebody else ended it
}

// State returns where the request is.
func (r *Request) State() State { return r.state }

// Endpoint returns the name of the endpoint where the request runs, or "".
func (r *Request) Endpoint() string {
	if r.ep == nil {
		return ""
	}
	return r.ep.name
}

// Generated returns the tokens that the request was last known to have generated.
func (r *Request) Generated() int64 { return r.generated }

func (r *Request) target() time.Duration {
	if r.Target > 0 {
		return r.Target
	}
	return defaultTarget
}

// slack is how long the request can still wait for its first token without being in
// danger of its target, negative if it is.
func (r *Request) slack(now time.Duration) time.Duration {
	return r.target()*6/10 - (now - r.offered)
}

// An Endpoint is one model server as its owner describes it.
type Endpoint struct {
	Name     string
	Capacity int64 // tokens; 0 if samples will tell
	Slots    int   // most requests that run at once; 0 is no bound
}

// A Sample is what an endpoint said of itself.
type Sample struct {
	Used     int64 // tokens
	Capacity int64 // tokens; 0 is as it was
	At       time.Duration
}

// A Step is what the owner is to do, in this order, and when to call Core.Step again if
// nothing happens before. Its slices are the core's, valid until its next method call.
type Step struct {
	Decisions []*Decision // for observers; those with victims ask for aborts, unless DryRun
	Dispatch  []*Request  // are Active now: start them
	Reject    []Rejection // are Done
	Next      time.Duration
	Idle      bool // nothing to wait for: Next is meaningless
}

// A Rejection is a request that won't start.
type Rejection struct {
	Request *Request
	Why     Why // WhyInfeasible or WhyOverloaded
}
