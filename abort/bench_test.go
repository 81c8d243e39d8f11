package abort_test

import (
	"context"
	"testing"

	"github.com/extevict/extevict/abort"
)

// BenchmarkRequest is a request's life, beside a bare child of the same context.
func BenchmarkRequest(b *testing.B) {
	for _, bc := range []struct {
		name string
		f    func(context.Context)
	}{
		{"parent alone", func(context.Context) {}},
		{"bare child", func(p context.Context) {
			_, cancel := context.WithCancelCause(p)
			cancel(nil)
		}},
		{"bare child, Done", func(p context.Context) {
			c, cancel := context.WithCancelCause(p)
			_ = c.Done()
			cancel(nil)
		}},
		{"New, Close", func(p context.Context) {
			own, _ := abort.New(p)
			own.Close()
		}},
		{"New, Done, Close", func(p context.Context) {
			own, ctx := abort.New(p)
			_ = ctx.Done()
			own.Close()
		}},
		{"New, Abort, Close", func(p context.Context) {
			own, _ := abort.New(p)
			own.Handle().Abort(abort.Preempted)
			own.Close()
		}},
		{"New, Done, Abort, Close", func(p context.Context) {
			own, ctx := abort.New(p)
			_ = ctx.Done()
			own.Handle().Abort(abort.Preempted)
			own.Close()
		}},
	} {
		b.Run(bc.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				p, cancel := context.WithCancel(context.Background())
				bc.f(p)
				cancel()
			}
		})
	}
}

// BenchmarkHandle is what is called for each message.
func BenchmarkHandle(b *testing.B) {
	own, ctx := abort.New(context.Background())
	defer own.Close()
	h := own.Handle()
	for _, watched := range []string{"", ", watched"} {
		for _, bc := range []struct {
			name string
			f    func()
		}{
			{"Err", func() { _ = h.Err() }},
			{"Outcome", func() { h.Outcome() }},
			{"Progress", func() { h.Progress() }},
			{"Advance", func() { own.Advance(abort.Held) }},
			{"Count", func() { own.Count(1, 100) }},
			{"context's Err", func() { _ = ctx.Err() }},
			{"FromContext", func() { abort.FromContext(ctx) }},
		} {
			b.Run(bc.name+watched, func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					bc.f()
				}
			})
		}
		_ = ctx.Done()
	}
}

func BenchmarkRegistry(b *testing.B) {
	var reg abort.Registry
	b.ReportAllocs()
	for b.Loop() {
		own, _ := abort.New(context.Background())
		reg.Add("0f8fad5b-d9cb-469f-a165-70867728950e", own.Handle())
		own.Close()
	}
}
