package policy

import (
	"math"
	"time"
)

// observer compares samples with the ledger. A gauge lags and knows nothing of what was
// just sent; the ledger knows nothing of prefixes that requests share and of load that
// others put there. So the ledger is what decides, corrected by how far samples were off it.
type observer struct {
	gamma   float64 // tokens that the engine holds for each of the ledger's: 0.3 to 1
	foreign float64 // tokens that are not of the ledger: u of the algorithm

	sampled  bool
	last     Sample
	arrived  time.Duration
	period   time.Duration // between samples
	frozen   float64       // ledger when the gauge began to say the same again and again
	doubtful bool          // the gauge says the same although much has changed
	history  [128]point    // of the ledger, a ring
	next     int
	spacing  time.Duration
}

// point is what the ledger expected the gauge to say at a time.
type point struct {
	at     time.Duration
	tokens float64
}

const (
	minPeriod   = 5 * time.Millisecond
	firstPeriod = 250 * time.Millisecond // before there are two samples
	maxPeriod   = 10 * time.Second
	learnRate   = 0.1
)

// fresh reports whether there is evidence of the endpoint's state.
func (o *observer) fresh(now time.Duration) bool {
	return o.sampled && !o.doubtful && now-o.arrived <= 3*o.period && now-o.last.At <= 3*maxPeriod
}

// expected is what a perfect gauge would say now, before gamma and foreign load.
func (e *endpoint) expected(now time.Duration) float64 {
	return float64(e.startedTokens+e.reclaimStarted) + e.headProgress(now)
}

// remember keeps what a gauge should say, for samples that come later.
func (e *endpoint) remember(now time.Duration) {
	o := &e.observer
	if i := (o.next + len(o.history) - 1) % len(o.history); o.history[i].at > 0 && now-o.history[i].at < max(o.spacing, minPeriod) {
		return
	}
	o.history[o.next] = point{max(now, 1), e.expected(now)}
	o.next = (o.next + 1) % len(o.history)
}

// recall returns what a gauge should have said at a time.
func (e *endpoint) recall(now, at time.Duration) float64 {
	o := &e.observer
	best := point{now, e.expected(now)}
	for _, p := range o.history {
		if p.at > 0 && (p.at-at).Abs() < (best.at-at).Abs() {
			best = p
		}
	}
	return best.tokens
}

// observe takes a sample that arrived now, and reports whether it was any good.
func (e *endpoint) observe(now time.Duration, s Sample) bool {
	o := &e.observer
	if s.Used < 0 || s.Capacity < 0 || s.At > now || s.At < 0 || o.sampled && s.At <= o.last.At {
		return false
	}
	capacity := e.capacity
	if s.Capacity > 0 {
		capacity = float64(min(s.Capacity, maxTokens))
	}
	if capacity == 0 || float64(s.Used) > 1.5*capacity {
		return false // not of this endpoint, or not in tokens
	}
	e.capacity = capacity
	if o.sampled {
		p := min(max(now-o.arrived, minPeriod), maxPeriod)
		if o.period == firstPeriod {
			o.period = p
		}
		o.period += (p - o.period) / 8
	} else {
		o.period = firstPeriod
	}
	o.spacing = max(o.period, now-s.At) / 32
	expected := e.recall(now, s.At)
	if !o.sampled || s.Used != o.last.Used {
		o.frozen, o.doubtful = expected, false
	} else if math.Abs(float64(s.Used)-o.gamma*expected-o.foreign) <= 0.05*e.capacity {
		o.frozen, o.doubtful = expected, false // it says the same because it is the same
	} else if math.Abs(expected-o.frozen) > 0.2*e.capacity {
		o.doubtful = true
	}
	o.sampled, o.last, o.arrived = true, s, now
	used := min(float64(s.Used), e.capacity)
	if !o.doubtful && e.cfg.has(Observer) {
		o.correct(used, expected, e.capacity)
	}
	return !o.doubtful
}

// correct learns from a gauge that said used where the ledger had expected.
func (o *observer) correct(used, expected, capacity float64) {
	if expected < 0.05*capacity {
		// Too little to compare with; what is there beyond it is foreign all the same.
		o.foreign += learnRate * (max(0, used-expected) - o.foreign)
		return
	}
	if used < expected {
		o.gamma += learnRate * (used/expected - o.gamma)
		o.foreign *= 1 - learnRate
	} else {
		o.gamma += learnRate * (1 - o.gamma)
		o.foreign += learnRate * (used - expected - o.foreign)
	}
	o.gamma = min(max(o.gamma, 0.3), 1)
}
