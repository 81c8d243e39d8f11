package extproc

import (
	"time"

	filterpb "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/extevict/extevict/abort"
)

// report is what the observer is going to be told. The stream's bench guards it.
type report struct {
	event    Event
	settled  bool  // event has the outcome
	answered bool  // event has the answer
	gone     bool  // the stream is over
	how      error // Recv's last
	told     bool
}

func (s *Stream) reportSettled(oc abort.Outcome) {
	if s.report == nil {
		return
	}
	phase := s.own.Handle().Progress().Phase
	s.tell(func(r *report) {
		r.settled = true
		r.event.Outcome, r.event.Phase, r.event.Settled = oc, phase, time.Now()
	})
}

func (s *Stream) reportAnswered(a Answer, err error) {
	if s.report == nil {
		return
	}
	s.tell(func(r *report) {
		r.answered = true
		if r.event.Answer, r.event.Err = a, err; a != AnswerNone {
			r.event.Answered = time.Now()
		}
	})
}

// reportFailed is told Recv's error of a request that was not aborted.
func (s *Stream) reportFailed(err error) {
	if s.report == nil {
		return
	}
	s.tell(func(r *report) { r.how = err })
}

// reportGone is told the error of an aborted request's last Recv, if there was one.
func (s *Stream) reportGone(how error) {
	if s.report == nil {
		return
	}
	s.tell(func(r *report) {
		r.gone = true
		r.event.Ended = time.Now()
		if r.how == nil {
			r.how = how
		}
	})
}

// effect judges by how the proxy hung up. An answered abort ends a stream with code
// Canceled (45,000 of 45,000 on Envoy 1.36 to 1.40); an EOF is a stream that something
// else ended first, a client that left in the same moment for one.
func (r *report) effect() Effect {
	switch {
	case r.event.Outcome != abort.Aborted:
		return EffectNone
	case r.event.Answer != AnswerNone && status.Code(r.how) == codes.Canceled:
		return EffectEnded
	}
	return EffectUnconfirmed
}

// obstacle judges a request that was not aborted. A stream whose request's headers are
// let on and of whose response no message came ends with code Canceled when Envoy has no
// more use for it, and with an EOF when the client leaves.
func (s *Stream) obstacle(r *report) Obstacle {
	f := &s.facts
	switch {
	case f.has(observing):
		return ObstacleObservability
	case r.event.Outcome == abort.Closed && f.mode() == filterpb.ProcessingMode_NONE && f.has(letOn) && !f.has(ownEnd) &&
		status.Code(r.how) == codes.Canceled:
		return ObstacleEarlyEnd
	}
	return ObstacleNone
}

// tell changes the report, and tells the observer once it is complete.
func (s *Stream) tell(change func(*report)) {
	s.bench.mu.Lock()
	r := s.report
	change(r)
	complete := r.gone && r.settled && (r.answered || r.event.Outcome != abort.Aborted)
	first := complete && !r.told
	r.told = complete
	e := r.event
	e.Effect, e.Obstacle = r.effect(), s.obstacle(r)
	s.bench.mu.Unlock()
	if first {
		e.Handle = s.own.Handle()
		var err error
		defer recovered("observer", &err)
		s.opts.observe(e)
	}
}
