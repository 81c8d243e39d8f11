package sim

import (
	"math"
	"slices"
	"time"

	"github.com/extevict/extevict/internal/engine"
)

// A Result is what came of a scene.
type Result struct {
	Target, Duration time.Duration

	TTFT          []time.Duration // of urgent requests, ascending; those without a first token as old as they were in the end
	SheddableTTFT []time.Duration // of those that are complete, ascending
	Waits         []time.Duration // of urgent requests until an endpoint had them, ascending
	OnTime        float64         // share of urgent requests with a first token within Target
	Late          []time.Duration // when the other urgent requests came, ascending
	Unfinished    int             // urgent requests without a first token

	// Each job that came is, in the end, in one of these. Evictions don't end a job, but when its client
	// gives up.
	Jobs                            int
	UrgentDone, SheddableDone       int // answers are complete
	GaveUp                          int
	Rejected                        int // by gateways
	WaitingUrgent, WaitingSheddable int // for an endpoint
	Running                         int // on one
	Retrying                        int // evicted, and to come again

	SheddableTokens int // of complete answers
	UrgentTokens    int
	Evictions       int
	MostEvictions   int     // of one request
	WastedTokens    int     // computed for requests that were evicted
	Waste           float64 // WastedTokens as a share of all that was computed for sheddable work
	Preemptions     int     // by engines

	Decisions []time.Duration // wall-clock time of each call of the gateway, ascending: all else is deterministic
	Usage     []Usage
	Evicted   []Eviction

	urgent  []*job
	prompts int // tokens of complete sheddable requests
}

// Usage is how full an endpoint was.
type Usage struct {
	Endpoint string
	At       time.Duration
	KV       float64 // share of its blocks
	Running  int
	Waiting  int
}

// An Eviction is one request that was evicted.
type Eviction struct {
	Endpoint       string
	At             time.Duration
	Prompt, Tokens int // of its prompt that were computed, of its answer
}

// Quantile returns the value below which a share q of the ascending ds lie.
func Quantile(ds []time.Duration, q float64) time.Duration {
	if len(ds) == 0 {
		return 0
	}
	return ds[min(len(ds)-1, int(q*float64(len(ds))))]
}

// TokensPerSecond is the sheddable work's throughput.
func (r *Result) TokensPerSecond() float64 { return float64(r.SheddableTokens) / r.Duration.Seconds() }

func (r *Result) evicted(j *job) {
	prompt := min(j.seq.Computed, j.rec.Prompt)
	r.Evictions++
	r.WastedTokens += prompt + j.seq.Generated
	r.Evicted = append(r.Evicted, Eviction{j.e.name, j.e.sim.now, prompt, j.seq.Generated})
}

func (r *Result) completed(j *job) {
	if j.urgent {
		r.UrgentDone++
		r.UrgentTokens += j.seq.Generated
		return
	}
	r.SheddableDone++
	r.SheddableTokens += j.seq.Generated
	r.prompts += j.rec.Prompt
	r.SheddableTTFT = append(r.SheddableTTFT, j.first-j.arrived)
}

func (r *Result) usage(e *server, st engine.Stats, now, every time.Duration) {
	if every <= 0 {
		return
	}
	for i := len(r.Usage) - 1; i >= 0; i-- {
		if r.Usage[i].Endpoint == e.name {
			if now-r.Usage[i].At < every {
				return
			}
			break
		}
	}
	r.Usage = append(r.Usage, Usage{e.name, now, st.KVUsage(), st.Running, st.Waiting})
}

func (r *Result) finish(now time.Duration, decided []time.Duration) {
	onTime := 0
	for _, j := range r.urgent {
		d := now - j.arrived
		if j.first > 0 {
			if d = j.first - j.arrived; d <= r.Target {
				onTime++
			}
		} else {
			r.Unfinished++
		}
		if j.first == 0 || d > r.Target {
			r.Late = append(r.Late, j.arrived)
		}
		r.TTFT = append(r.TTFT, d)
	}
	r.OnTime = float64(onTime) / math.Max(1, float64(len(r.urgent)))
	r.Waste = float64(r.WastedTokens) / float64(r.SheddableTokens+r.prompts+r.WastedTokens+1)
	r.Decisions = decided
	slices.Sort(r.TTFT)
	slices.Sort(r.Late)
	slices.Sort(r.SheddableTTFT)
	slices.Sort(r.Decisions)
}
